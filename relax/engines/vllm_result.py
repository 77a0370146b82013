"""From vLLM's output of one request to a `Result`, refusing everything that must not be trained on."""

from typing import Any

import numpy as np

from relax.engines.base import BadResult, Request, Result
from relax.weights.manifest import WeightTag

ROUNDING = 1e-3
"""How far above 0 a log-prob may come out of a float32 log-softmax."""


def version_label(tag: WeightTag) -> str:
    """What vLLM is told to call these weights; it comes back with every token."""
    return f"{tag.lineage}.{tag.version}"


def result_of(request: Request, output: Any) -> Result:
    """`output` is the final `RequestOutput` of a request with n = 1 and flat log-probs. Raises `BadResult`."""
    completion = output.outputs[0]
    token_ids = np.asarray(completion.token_ids, np.int32)
    n = len(token_ids)
    reason = completion.finish_reason
    if reason not in ("stop", "length", "abort"):
        raise BadResult(f"request {request.id}: vLLM ended it with finish reason {reason!r} after {n} tokens")
    if n == 0 and reason != "abort":
        raise BadResult(f"request {request.id}: vLLM ended it by {reason!r} without a token")
    return Result(request.id, token_ids, _logprobs(request, completion, n), reason, _runs(request, completion, n))


def _logprobs(request: Request, completion: Any, n: int) -> np.ndarray:
    values = completion.logprobs.logprobs if completion.logprobs is not None else []
    if len(values) != n:
        raise BadResult(f"request {request.id}: vLLM gave {len(values)} log-probs for {n} tokens")
    # None becomes NaN here: never 0.0, which would read as certainty.
    logprobs = np.asarray(values, np.float64).astype(np.float32)
    bad = np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= ROUNDING)))
    if len(bad):
        at = int(bad[0])
        raise BadResult(
            f"request {request.id}: log-prob of response token {at} of {n} (id {completion.token_ids[at]}) "
            f"is {values[at]}"
        )
    return logprobs


def _runs(request: Request, completion: Any, n: int) -> tuple[tuple[int, int], ...]:
    spans = completion.weight_versions if n else []
    try:
        runs = tuple((int(span.version.partition(".")[2]), span.end - span.start) for span in spans or ())
    except ValueError:
        raise BadResult(f"request {request.id}: vLLM names the weights {[s.version for s in spans]}") from None
    if sum(length for _, length in runs) != n:
        raise BadResult(f"request {request.id}: vLLM's weight versions {runs} do not add up to {n} tokens")
    return runs
