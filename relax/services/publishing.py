"""Publication beside the next step: what the trainer has staged becomes a version while it trains on."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from relax.metrics import Metric, Metrics
from relax.services.milestone import Milestone
from relax.weights.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Staged:
    """A version on its way. `step` counts optimizer steps; `place` of the staging holds its weights, None: they are
    those of the version published before it. `since`: monotonic seconds."""

    version: int
    step: int
    place: int | None
    since: float


class Publishing:
    """At most two versions are under way: one that is being published and the newest, which waits for it.

        offer -> staged -> waiting -> under way -> published
                              |
                              +-> overtaken by the next offer: skipped

    A version that was begun is finished, and one is skipped only for a newer one, so the newest is always published:
    nothing that waits for a version >= v waits for ever. Where somebody needs v itself (lockstep, a reference that is
    to become v) there is no batch that could overtake it. With two places to stage to, an offer never waits for one:
    the version under way is in one of them, and the other is free or holds what is overtaken.

    Belongs to one event loop. `stage(place)` copies the present weights, `publish(staged)` stores one version,
    `tell(staged, manifest)` makes each known, in order; what is known is published.
    """

    def __init__(
        self,
        stage: Callable[[int], Awaitable[None]],
        publish: Callable[[Staged], Awaitable[Manifest]],
        tell: Callable[[Staged, Manifest], Awaitable[None]],
    ) -> None:
        self.published = Milestone()
        self.offered = -1
        self._stage, self._publish, self._tell = stage, publish, tell
        self._waiting: Staged | None = None
        self._under_way: Staged | None = None
        self._arrived = asyncio.Event()
        self._metrics = Metrics()
        self._log = structlog.get_logger()

    async def offer(self, version: int, step: int, *, changed: bool) -> None:
        """The present weights are `version`; returns when they are staged and may change.

        `changed`: since the offer before. If not, nothing is staged, and the tag alone is published.
        """
        since = time.monotonic()
        overtaken, self._waiting = self._waiting, None
        place = overtaken.place if overtaken else None
        if overtaken is not None:
            self._metrics.sum("perf/publications_skipped", 1)
            self._log.info("publication_skipped", version=overtaken.version, newer=version)
        if changed:
            place = self._free_place() if place is None else place
            await self._stage(place)
        self.offered = version
        self._waiting = Staged(version, step, place, since)
        self._arrived.set()

    async def run(self) -> None:
        """Publishes what is offered, one after the other, until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while (staged := self._waiting) is not None:
                self._waiting, self._under_way = None, staged
                manifest = await self._publish(staged)
                self._under_way = None
                self._metrics.mean("perf/publish_s", time.monotonic() - staged.since, 1)
                await self._tell(staged, manifest)
                self.published.reach(staged.version)

    def take(self) -> dict[str, Metric]:
        """What was measured since it was taken last."""
        taken, self._metrics = self._metrics, Metrics()
        return taken.wire()

    def _free_place(self) -> int:
        return 1 if self._under_way is not None and self._under_way.place == 0 else 0
