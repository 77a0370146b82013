"""What runs inside vLLM's engine-core process: weights in place from shared memory, and an end with the parent."""

import ctypes
import logging
import multiprocessing
import os
import signal
import time
from typing import Any

from relax.weights.checkpoint import checkpoint_shapes
from relax.weights.errors import WeightError
from relax.weights.manifest import Manifest, Shapes
from relax.weights.store import ChunkStore

PR_SET_PDEATHSIG = 1

CHATTY = (
    # Warns at every load of layers without weights of their own; `load_in_place` checks what was left out.
    "vllm.model_executor.model_loader.reload.layerwise",
    # Warns at every load of every tensor whose dtype is not the engine's; the cast is what is wanted.
    "vllm.model_executor.models.utils",
)
"""Loggers of vLLM whose warnings would fill the log with each version."""


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Does nothing in a process that multiprocessing did not start. A parent that died before the call is noticed too.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:
        os._exit(1)


# vLLM imports this module when it builds the worker: the earliest moment at which our code runs in the child.
die_with_parent()


class WeightLoader:
    """Mixed into vLLM's worker class (`worker_extension_cls`) and called through `collective_rpc`."""

    # Given by the worker class.
    model_runner: Any
    vllm_config: Any
    _relax_expected: Shapes | None = None

    def relax_load(self, manifest_json: bytes, store: str) -> dict[str, Any]:
        """Load one set of weights in place.

        Returns {"seconds", "tensors", "bytes"}, or {"refused", "message"} when the set was refused before any weight
        was touched. An exception means that the weights in memory are no version at all.
        """
        started = time.perf_counter()
        if self._relax_expected is None:
            self._relax_expected = checkpoint_shapes(self.vllm_config.model_config.model)
        manifest = Manifest.from_json(manifest_json, "the rollout service")
        touched = False
        try:
            with ChunkStore(store).open(manifest, expected=self._relax_expected) as lease:
                touched = True
                load_in_place(self.model_runner.get_model(), lease.items(), self.vllm_config)
        except WeightError as error:
            if touched:
                raise
            return {"refused": type(error).__name__, "message": str(error)}
        return {
            "seconds": time.perf_counter() - started,
            "tensors": len(manifest.tensors),
            "bytes": manifest.tag.bytes,
        }


def load_in_place(model: Any, weights: Any, vllm_config: Any) -> None:
    """Give `model` (as vLLM built it) the tensors of `weights`, (Hugging Face name, tensor), under vLLM's own rules.

    Plain `model.load_weights` fails on CPU, where linears are packed after loading. Raises RuntimeError when vLLM left
    a parameter without weights.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    wanted = {name for name, _ in model.named_parameters()}
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    with set_current_vllm_config(vllm_config):
        initialize_layerwise_reload(model)
        loaded = model.load_weights(weights)
        finalize_layerwise_reload(model, vllm_config.model_config)
        refresh_packed_embeddings(model)
    missing = sorted(wanted - set(loaded)) if loaded is not None else []
    if missing:
        raise RuntimeError(f"vLLM took no weights for {', '.join(missing)}")


def refresh_packed_embeddings(model: Any) -> None:
    """Pack the output head again where it shares the embedding's weights.

    vLLM's CPU backend keeps a packed copy beside a tied head's weight. Nothing is loaded *into* the head, so the layer
    wise reload leaves that copy as it was: the update reports success and log-probs are wrong by up to 0.9.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        # Only CPU builds have the packed copy.
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
