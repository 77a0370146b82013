"""An engine without a model: samples of drawn lengths that end when a model of the replica's speed says so.

A replica has slots; a sample of n tokens holds one of them for n / (tokens per second) seconds, and the others wait in
the order they came. Everything but the computing is as with a real engine: weights are opened in the node's store and
their digests checked, versions are kept token by token, samples can be paused, cancelled and aborted.

Time is kept as a plan. A slot that a sample leaves at t goes to the next one at t, however late the process wakes up,
so a busy machine delays the news of a sample and never the samples behind it.
"""

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from relax.engines.base import EngineError, EngineInfo, FinishReason, Request, RequestRefused, Result
from relax.engines.checkpoint import ModelFacts, model_facts
from relax.engines.requests import check_requests
from relax.simulation.lengths import LengthModel
from relax.simulation.speed import SpeedModel
from relax.weights.manifest import Manifest, WeightTag
from relax.weights.store import ChunkStore

TEXT_TOKENS = 1 << 16
"""Responses are cut out of one text of so many random tokens."""


@dataclass(slots=True, eq=False)
class _Sample:
    """`length` is the tokens it will have; `start` when it got its slot, None in the queue. `cut` counts the tokens of
    weights that are not served any more, `runs` says which."""

    request: Request
    future: asyncio.Future[Result]
    length: int
    reason: FinishReason
    arrived: float
    start: float | None = None
    cut: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)


class SimulatedEngine:
    """See `relax.engines.base.Engine` for what the methods promise.

    Of `checkpoint` only the vocabulary is used. `tokens_per_second` is the speed of one of `slots`. A sample whose
    drawn length is above its `max_tokens` is truncated there. `clock` gives seconds that never go back.
    """

    died: asyncio.Future[str]

    def __init__(
        self,
        checkpoint: Path | str,
        *,
        lengths: LengthModel,
        tokens_per_second: float,
        slots: int,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checkpoint, self._facts = str(checkpoint), model_facts(checkpoint)
        self._lengths, self._speed, self._slots = lengths, tokens_per_second, slots
        self._max_model_len, self._clock = max_model_len, clock
        self._text = _text(self._facts)
        self._logprob = -math.log(self._facts.vocab_size)  # of a token drawn with equal chance
        self._tag: WeightTag | None = None
        self._samples: dict[str, _Sample] = {}
        self._queue: deque[_Sample] = deque()
        self._ends: list[tuple[float, int, _Sample]] = []  # a heap of those in a slot, ended ones among them
        self._free = [-math.inf] * slots  # a heap: since when each free slot is free
        self._order = 0
        self._stopped = 0.0  # seconds of all pauses, so that a paused engine has a clock that stands still
        self._paused_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False

    @classmethod
    def from_options(cls, options: Any, replica: int) -> Self:
        """The engine that a run's options ask for as replica number `replica`."""
        return cls(
            options.hf_checkpoint,
            lengths=LengthModel.parse(options.sim_length),
            tokens_per_second=SpeedModel.parse(options.sim_tokens_per_second).of(replica),
            slots=options.sim_slots,
            max_model_len=options.rollout_max_prompt_len + options.rollout_max_response_len,
        )

    # ---- life ----

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.died = self._loop.create_future()

    async def shutdown(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._disarm()
        for sample in list(self._samples.values()):
            sample.future.cancel()
        if hasattr(self, "died") and not self.died.done():
            self.died.cancel()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            engine="simulated",
            checkpoint=self._checkpoint,
            dtype="none",
            max_model_len=self._max_model_len,
            max_num_seqs=self._slots,
            eos_token_ids=self._facts.eos_token_ids,
            tag=self._tag,
            pids=(),
        )

    @property
    def running(self) -> int:
        return len(self._samples)

    def tokens(self) -> dict[str, int]:
        return {name: self._tokens(sample) for name, sample in self._samples.items()}

    # ---- samples ----

    async def generate(self, request: Request) -> Result:
        (future,) = await self.submit([request])
        return await future

    async def submit(self, requests: Sequence[Request], *, together: bool = False) -> list[asyncio.Future[Result]]:
        # All of them arrive at one moment, whatever `together` says.
        self._check(requests)
        now = self._now()
        samples = [self._sample(request, now) for request in requests]
        for sample in samples:
            self._samples[sample.request.id] = sample
            self._queue.append(sample)
            sample.future.add_done_callback(partial(self._cancelled, sample))
        self._advance()
        return [sample.future for sample in samples]

    def _check(self, requests: Sequence[Request]) -> None:
        if self._closing or not hasattr(self, "died"):
            raise EngineError("the simulated engine is not running")
        if self._tag is None:
            raise EngineError("no weights are loaded yet: version 0 comes the way of every other")
        check_requests(requests, self._facts, self._max_model_len, self._samples)
        for request in requests:
            if request.seed is None:
                raise RequestRefused(
                    request.id, f"request {request.id} has no seed, and the length of a sample is drawn from it"
                )

    def _sample(self, request: Request, now: float) -> _Sample:
        assert request.seed is not None
        drawn = self._lengths.draw(request.seed)
        reason: FinishReason = "stop" if drawn <= request.max_tokens else "length"
        return _Sample(request, self._loop.create_future(), min(drawn, request.max_tokens), reason, now)

    async def abort(self, ids: Sequence[str]) -> None:
        self._advance()  # what has ended by now has ended by itself
        for sample in [self._samples[i] for i in ids if i in self._samples]:
            self._end(sample, self._tokens(sample), "abort")
            self._forget(sample)

    def _cancelled(self, sample: _Sample, future: asyncio.Future[Result]) -> None:
        if future.cancelled():
            self._forget(sample)

    def _forget(self, sample: _Sample) -> None:
        """A sample that did not come to its end: its slot is free from now on."""
        if self._samples.pop(sample.request.id, None) is None:
            return
        if sample.start is not None:
            heapq.heappush(self._free, self._now())
        if not self._closing:
            self._advance()

    # ---- the plan ----

    def _now(self) -> float:
        return (self._clock() if self._paused_at is None else self._paused_at) - self._stopped

    def _advance(self) -> None:
        """Everything that was to happen up to now, in its order."""
        now = self._now()
        while True:
            self._fill_slots()
            while self._ends and self._ends[0][2].future.done():
                heapq.heappop(self._ends)
            if not self._ends or self._ends[0][0] > now:
                break
            end, _, sample = heapq.heappop(self._ends)
            del self._samples[sample.request.id]
            heapq.heappush(self._free, end)
            self._end(sample, sample.length, sample.reason)
        self._arm(now)

    def _fill_slots(self) -> None:
        while self._queue and self._free:
            sample = self._queue.popleft()
            if not sample.future.done():
                sample.start = max(heapq.heappop(self._free), sample.arrived)
                self._order += 1
                end = sample.start + sample.length / self._speed
                heapq.heappush(self._ends, (end, self._order, sample))

    def _arm(self, now: float) -> None:
        self._disarm()
        if self._ends and self._paused_at is None:
            # Rounded up to the loop's millisecond: a timer that comes too early would only be set again.
            wait = math.ceil(max(0.0, self._ends[0][0] - now) * 1000) / 1000
            self._timer = self._loop.call_later(wait, self._advance)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tokens(self, sample: _Sample) -> int:
        """Tokens that an unfinished sample has by now."""
        if sample.start is None:
            return 0
        return max(sample.cut, min(int((self._now() - sample.start) * self._speed), sample.length - 1))

    def _end(self, sample: _Sample, tokens: int, reason: FinishReason) -> None:
        assert self._tag is not None and sample.request.seed is not None
        runs = sample.runs + ([(self._tag.version, tokens - sample.cut)] if tokens > sample.cut else [])
        token_ids = self._text[(np.arange(tokens) + sample.request.seed % TEXT_TOKENS) % TEXT_TOKENS]
        if reason == "stop":
            token_ids[-1] = self._facts.eos_token_ids[0]
        logprobs = np.full(tokens, self._logprob, np.float32)
        sample.future.set_result(Result(sample.request.id, token_ids, logprobs, reason, tuple(runs)))

    # ---- weights ----

    async def load(self, manifest: Manifest, store: Path | str, *, deadline: float) -> None:
        if self._samples and self._paused_at is None:
            raise EngineError(f"cannot load {manifest.tag}: {len(self._samples)} samples are running; drain or pause")
        if self._tag is None or self._tag.digest != manifest.tag.digest:
            # Every byte is checked, as by an engine that takes them over. They are few: nothing here can wait.
            with ChunkStore(store).open(manifest):
                pass
        for sample in self._samples.values():
            tokens = self._tokens(sample)
            if tokens > sample.cut:
                assert self._tag is not None
                sample.runs.append((self._tag.version, tokens - sample.cut))
                sample.cut = tokens
        self._tag = manifest.tag

    async def pause(self) -> None:
        if self._paused_at is None:
            self._advance()
            self._paused_at = self._clock()
            self._disarm()

    async def resume(self) -> None:
        if self._paused_at is not None:
            self._stopped += self._clock() - self._paused_at
            self._paused_at = None
            self._advance()


def _text(facts: ModelFacts) -> np.ndarray:
    """int32 [TEXT_TOKENS], drawn with equal chance from the vocabulary without its ends."""
    ordinary = np.setdiff1d(np.arange(facts.vocab_size, dtype=np.int32), facts.eos_token_ids)
    return np.random.default_rng(0).choice(ordinary, TEXT_TOKENS)
