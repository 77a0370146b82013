"""The policy of a run without a model: takes real batches, trains for a given time, is published as little.

Its weights are one small tensor that holds the version, so every version travels the way of every other weight: store,
manifest, announcement, load.

Time is kept as a plan, like the engine's: a batch that was there when the one before it ended began at that moment,
however late this process woke up; so did the publication of what was staged then.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from relax.checkpoints import Writing
from relax.metrics import Metrics
from relax.services.models.base import Taken, Weights
from relax.services.service import Service, ServiceError

STATE = "version"
"""The one file of its part of a checkpoint."""

WEIGHTS = 256
"""float32 values of the one tensor."""

T = TypeVar("T")


class SimulatedPolicy:
    """See `PolicyModel`. All times are monotonic seconds."""

    shapes = None

    def __init__(self, service: Service) -> None:
        self._options, self._cut = service.options, service.context.cut
        self.copies = _Copies()
        self._version = self._cut
        self._trained_at = 0.0  # planned end of the last batch
        self._published_at = 0.0  # planned end of the last publication
        self._staged: dict[int, tuple[int, float]] = {}  # place -> version, planned moment from which it is there

    async def build(self, num_batches: int | None) -> None:
        # The first publication is part of the start, which takes no simulated time.
        self._trained_at = time.monotonic() - self._options.sim_publish_seconds

    async def load(self, part: Path) -> int:
        saved = await asyncio.to_thread((part / STATE).read_text)
        if int(saved) != self._cut:
            raise ServiceError(f"{part / STATE} is of batch {saved}, expected {self._cut}")
        return self._cut * self._options.num_steps_per_rollout

    async def reserve(self) -> int:
        return len(_state(self._version))

    async def train(self, taken: Taken) -> tuple[Metrics, float]:
        seconds = self._options.sim_train_seconds
        self._trained_at = max(taken.arrived, self._trained_at) + seconds
        await _until(self._trained_at)
        self._version = taken.message.batch + 1
        return Metrics(), seconds

    async def stage(self, place: int) -> None:
        self._staged[place] = self._version, self._trained_at

    async def read(self, place: int | None, use: Callable[[Weights | None], T]) -> T:
        if place is None:
            return await asyncio.to_thread(use, None)
        version, there_at = self._staged[place]
        self._published_at = max(there_at, self._published_at) + self._options.sim_publish_seconds
        await _until(self._published_at)
        return await asyncio.to_thread(use, [("simulated.version", np.full(WEIGHTS, version, np.float32))])

    async def export(self, path: Path) -> str:
        return ""

    async def close(self, clean: bool) -> None:
        """There is nothing to let go."""


class _Copies:
    """The state is a number: how many batches are trained."""

    def __init__(self) -> None:
        self._batch = -1

    async def take(self, batch: int) -> None:
        self._batch = batch

    async def write(self, part: Path) -> str:
        def write() -> None:
            part.mkdir()
            (part / STATE).write_text(_state(self._batch))
            Writing(self._batch, part.parent).close_part(part.name)

        try:
            await asyncio.to_thread(write)
        except OSError as error:
            return str(error)
        return ""

    async def drop(self) -> None:
        """There is nothing to let go."""


def _state(batch: int) -> str:
    return f"{batch}\n"


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))
