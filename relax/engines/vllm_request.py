"""From a `Request` to the parameters that make vLLM sample just that."""

from typing import Any

from relax.engines.base import Request


def sampling_parameters(request: Request, eos_token_ids: tuple[int, ...]) -> Any:
    """vLLM's `SamplingParams`. Raises ValueError where it refuses them."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    stop = eos_token_ids if request.stop_token_ids is None else request.stop_token_ids
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(request.top_k, 0),
        seed=request.seed,
        max_tokens=request.max_tokens,
        stop_token_ids=list(stop),
        # Else vLLM adds the end tokens of generation_config.json to whatever the request says.
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
