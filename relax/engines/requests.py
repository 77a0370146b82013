"""Which requests an engine can serve at all, whatever engine it is."""

from collections.abc import Container, Sequence

from relax.engines.base import Request, RequestRefused
from relax.engines.checkpoint import ModelFacts


def check_requests(requests: Sequence[Request], facts: ModelFacts, max_model_len: int, running: Container[str]) -> None:
    """Raises RequestRefused for the first that is none for this model, or has the id of one that is `running`."""
    ids = set()
    for request in requests:
        if request.id in running or request.id in ids:
            raise RequestRefused(request.id, f"request {request.id} is already running; ids must be unique")
        ids.add(request.id)
        _check(request, facts, max_model_len)


def _check(request: Request, facts: ModelFacts, max_model_len: int) -> None:
    n, who = len(request.prompt), f"request {request.id}"
    if n == 0:
        raise RequestRefused(request.id, f"{who} has an empty prompt")
    if request.max_tokens < 1:
        raise RequestRefused(request.id, f"{who} asks for {request.max_tokens} tokens; at least 1")
    if n + request.max_tokens > max_model_len:
        raise RequestRefused(
            request.id,
            f"{who}: prompt of {n} tokens and response of up to {request.max_tokens} do not fit the engine's "
            f"{max_model_len} (--rollout-max-prompt-len + --rollout-max-response-len)",
        )
    low, high = int(request.prompt.min()), int(request.prompt.max())
    if low < 0 or high >= facts.vocab_size:
        raise RequestRefused(
            request.id,
            f"{who}: token id {low if low < 0 else high} is outside the model's vocabulary of {facts.vocab_size}; "
            "is this the model's own tokenizer?",
        )
