"""The environment that vLLM reads at import. The one place where Relax sets it."""

import os
import sys

ENVIRONMENT = {
    # A wrong checkpoint path costs 25 s of retries against a hub otherwise.
    "HF_HUB_OFFLINE": "1",
    # With log-probs on, the first request would compile a helper for up to 31 s.
    "TORCHDYNAMO_DISABLE": "1",
    # vLLM's CPU platform turns the in-process executor into one more worker process unless this is 0.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Fork from a process with an event loop, zmq and threads may deadlock the child.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # The launcher owns core affinity; vLLM's own binding would put every engine of a node on the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Records go to the service's log instead of vLLM's own handler.
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

DEFAULTS = {
    # Two threads beside a busy neighbour on the same cores collapse to one token per second.
    "OMP_NUM_THREADS": "1",
}

UNSET = (
    # Overrides kv_cache_memory_bytes in whole GiB; vLLM crashes on an empty value.
    "VLLM_CPU_KVCACHE_SPACE",
)


def prepare_environment() -> None:
    """Set it for this process and its children. Raises RuntimeError when vLLM was imported under other values."""
    changed = [name for name, value in ENVIRONMENT.items() if os.environ.get(name) != value]
    if changed and "vllm" in sys.modules:
        raise RuntimeError(f"vllm was imported before Relax set {', '.join(changed)}; import relax.engines.vllm first")
    os.environ.update(ENVIRONMENT)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    for name in UNSET:
        os.environ.pop(name, None)
