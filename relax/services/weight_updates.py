"""How a rollout replica comes to serve new weights.

They are fetched while the engine goes on, the engine is paused, they load, it resumes. What `--partial-rollout` changes
is the one step before the pause: without it, admission closes at the announcement and the running samples end first, so
that no sample holds two versions and a replica under continuous load still gets to load; with it, they are paused with
the engine and go on under the new weights, their tokens kept.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from relax.config.options import Options
from relax.engines.base import Engine
from relax.protocol.messages import Serving
from relax.services.held_draws import HeldDraws
from relax.services.watchdog import Watchdog
from relax.weights.agent import WeightAgent
from relax.weights.errors import NotStored
from relax.weights.manifest import Manifest

log = structlog.get_logger()


class WeightUpdates:
    """`admission` is set while samples may start. `report` tells the controller what is served; `changed` is called
    whenever something that the replica does by this has begun or ended."""

    def __init__(
        self,
        engine: Engine,
        draws: HeldDraws,
        options: Options,
        watchdog: Watchdog,
        report: Callable[[Serving], None],
        changed: Callable[[], None],
    ) -> None:
        self._engine, self._draws, self._options, self._watchdog = engine, draws, options, watchdog
        self._report, self._changed = report, changed
        self._newest: Manifest | None = None
        self._announced = asyncio.Event()
        self.admission = asyncio.Event()
        self.loading: int | None = None  # the version that is being loaded
        self.served = False  # whether any weights were

    def announced(self, manifest: Manifest) -> None:
        """This version is to be served, unless a newer one was announced."""
        if self._newest is not None and manifest.tag.version <= self._newest.tag.version:
            return
        self._newest = manifest
        if not self._options.partial_rollout:
            self.admission.clear()
        self._announced.set()
        self._changed()

    async def follow(self, agent: WeightAgent, store: Path) -> None:
        """Serves what is announced, until cancelled; `store` is the directory that `agent` fetches to."""
        while True:
            await self._announced.wait()
            self._announced.clear()
            manifest = self._newest
            assert manifest is not None
            try:
                # Each chunk has the peer's deadline; all of them together take as long as they take.
                await agent.ensure(manifest, deadline=self._options.stall_timeout)
                if not self._options.partial_rollout:
                    await self._draws.drained.wait()
                if self._newest is manifest:
                    await self._load(manifest, store)
            except NotStored:
                # The trainer or this node has moved past it; the announcement of the newer one is on its way.
                log.info("version_overtaken", version=manifest.tag.version)

    async def _load(self, manifest: Manifest, store: Path) -> None:
        version, started = manifest.tag.version, time.monotonic()
        self.loading = version
        self._changed()
        with self._watchdog.work("loading weights"):
            await self._engine.pause()
            try:
                await self._engine.load(manifest, store, deadline=self._options.peer_timeout)
                self.served = True
            except NotStored:
                await self._go_on()
                raise
            await self._go_on()
        running = tuple(draw.order.lease for draw in self._draws.running.values())
        self._report(Serving(version, self._options.rollout_credit, running))
        if self._newest is manifest:
            self.admission.set()
        self._changed()
        seconds = round(time.monotonic() - started, 3)
        log.info("weights_loaded", version=version, seconds=seconds, running=len(running))

    async def _go_on(self) -> None:
        await self._engine.resume()
        self.loading = None
        self._changed()
