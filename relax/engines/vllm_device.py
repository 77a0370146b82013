"""What differs between vLLM's CPU build and a GPU: arguments only, no code path of ours."""

from typing import Any

from relax.engines.base import EngineError
from relax.engines.checkpoint import CPU_HEAD_DIMS, ModelFacts

MIN_STEP_TOKENS = 2048
"""Tokens of one engine step on CPU; at least one whole prompt, since prompts are never cut there."""


def device_arguments(facts: ModelFacts, max_model_len: int) -> dict[str, Any]:
    """Engine arguments for the device of this process. Raises `EngineError` when it cannot run the model."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return {}
    if facts.head_dim not in CPU_HEAD_DIMS:
        # vLLM itself notices only at the first request, where it takes the engine core down.
        raise EngineError(
            f"the model has attention heads of {facts.head_dim}, vLLM's CPU build has kernels for "
            f"{', '.join(map(str, sorted(CPU_HEAD_DIMS)))}; use a model with one of these, or a GPU"
        )
    return {
        # A chunked prompt rewinds its request's generator, which CPU generators cannot: the engine core dies.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(MIN_STEP_TOKENS, max_model_len),
        # Small blocks: prompts of an RL dataset are short, and a group shares its prompt block by block.
        "block_size": 32,
        # With VLLM_ENABLE_V1_MULTIPROCESSING=0 the engine core is the worker, not one more process.
        "distributed_executor_backend": "uni",
    }
