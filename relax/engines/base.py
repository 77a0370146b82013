"""What every inference engine does: token ids in, token ids with their log-probs and weight versions out."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from relax.weights.manifest import Manifest, WeightTag

FinishReason = Literal["stop", "length", "abort"]


class EngineError(Exception):
    """An engine could not do what was asked. The message names the engine, the request or the weights."""


class RequestRefused(EngineError):
    """The request of this id cannot be served as it is (length, token ids, parameters): asking again will not help.
    None of those that were submitted with it is served."""

    def __init__(self, request: str, message: str) -> None:
        super().__init__(message)
        self.request = request


class BadResult(EngineError):
    """The engine answered with something that must not be trained on (a log-prob that is None or NaN, ...)."""


class EngineDied(EngineError):
    """The engine's process is gone. Its samples were lost, none of them was rejected."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to draw.

    `prompt` is int32 [prompt tokens]. `temperature` 0 is greedy. `top_k` -1 is off. What the sample draws depends on
    `seed` alone (in fp32; engines are not batch-invariant in bf16). It ends at one of `stop_token_ids`, by default the
    checkpoint's own; the stop token stays in the response.
    """

    id: str
    prompt: np.ndarray
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One sample.

    `token_ids` int32 [n] and `logprobs` float32 [n], n >= 0: behaviour log-probs of the distribution that was sampled
    from, after temperature, top-p and top-k. `runs` says which weights sampled them: (version, number of tokens) in
    order, the numbers add up to n. `finish_reason` is the engine's; "abort" carries what there was.
    """

    id: str
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is and serves. `tag` is None until weights were loaded; `pids` are its processes."""

    engine: str
    checkpoint: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]
    tag: WeightTag | None
    pids: tuple[int, ...]


class Engine(Protocol):
    """An inference engine of one rollout replica, used from one event loop.

    An engine starts without weights and refuses to sample until `load` has given it some. Errors are `EngineError`s,
    and `WeightError`s where a set of weights was refused.
    """

    died: asyncio.Future[str]
    """Done when the engine ends by itself, with what is known about it. Exists after `start`."""

    async def start(self) -> None:
        """Bring the engine up, without weights."""

    async def submit(self, requests: Sequence[Request], *, together: bool = False) -> list[asyncio.Future[Result]]:
        """Queue requests in this order. `together`: all of them are queued before the engine's next step.

        Cancelling a future aborts its request.
        """

    async def generate(self, request: Request) -> Result:
        """Draw one sample. Cancelling the call aborts the request."""

    async def abort(self, ids: Sequence[str]) -> None:
        """End these requests now; each gives what it has, with finish reason "abort". Unknown ids are ignored."""

    async def load(self, manifest: Manifest, store: Path | str, *, deadline: float) -> None:
        """Serve these weights from the node's store, in place; at most `deadline` seconds.

        Samples must have ended or the engine must be paused; whatever was computed with the old weights is dropped:
        paused samples keep their tokens alone and what they draw next is as if the new weights had read them. A set
        that is refused leaves the old weights in service.
        """

    async def pause(self) -> None:
        """Stop stepping, after the step in progress; running samples keep their tokens, new ones queue."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def shutdown(self) -> None:
        """End every process of the engine. May be called at any time, and again."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def running(self) -> int:
        """Samples queued or in progress."""

    def tokens(self) -> dict[str, int]:
        """How many tokens each of them has by now, by request id."""
