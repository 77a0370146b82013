"""The actor of a run without a model: takes real batches, trains for a given time, publishes real versions of little.

Receives and sends what the actor does. Its weights are one small tensor that holds the version, so every version
travels the way of every other weight: store, manifest, announcement, load.

Time is kept as a plan, like the engine's: a batch that was there when the one before it ended began at that moment,
however late this process woke up.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np

from relax.checkpoints import Writing
from relax.metrics import Metrics
from relax.protocol.messages import Chunk, FetchChunk, Finish, Finished, Published, Started
from relax.services.publishing import Publishing, Staged
from relax.services.service import Context, ServiceError
from relax.services.trainer import Taken, Trainer
from relax.weights.manifest import Manifest
from relax.weights.publication import Publisher
from relax.weights.store import ChunkStore

STATE = "version"
"""The one file of its part of a checkpoint."""

WEIGHTS = 256
"""float32 values of the one tensor."""


class SimulatedActor(Trainer):
    role = "actor"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._trained_at = 0.0  # planned end of the last batch; all times are monotonic seconds
        self._offered_at: dict[int, float] = {}  # version -> planned moment from which it is published
        self._published_at = 0.0  # planned end of the last publication

    def handlers(self) -> dict[type, Any]:
        return super().handlers() | {Finish: self.on_finish, FetchChunk: self.on_fetch_chunk}

    async def prepare(self) -> None:
        self.store = ChunkStore(self.run.shm_dir, create=True)
        self.publisher = Publisher(
            self.store, run_id=self.run.run_id, lineage=self.lineage, manifests=self.run.weights_dir
        )
        self.publishing = Publishing(self._stage, self._publish, self._published)
        self.spawn(self.publishing.run(), "publishing")
        cut = self.context.cut
        if self.run.checkpoint is not None:
            saved = await asyncio.to_thread((self.run.checkpoint / self.role / STATE).read_text)
            if int(saved) != cut:
                raise ServiceError(f"{self.run.checkpoint / self.role / STATE} is of batch {saved}, expected {cut}")
        # The first version is part of the start, which takes no simulated time.
        await self._offer(cut, time.monotonic() - self.options.sim_publish_seconds)
        self.begin(_Copies())

    # --- training ----------------------------------------------------------------------------------------------------

    async def train(self, batch: int, taken: Taken, waited: float) -> None:
        tensors, message = taken.tensors, taken.message
        self.report(Started(batch, message.commit))
        begun = max(taken.arrived, self._trained_at)
        self._trained_at = begun + self.options.sim_train_seconds
        await _until(self._trained_at)
        await self.keeping.trained(batch + 1)
        self.version.reach(batch + 1)
        metrics = Metrics()
        metrics.sum("perf/trainer_wait_s/batch", waited - taken.held_up(waited))
        metrics.sum("perf/trainer_wait_s/publication", 0.0)
        metrics.sum("perf/trainer_wait_s/payload", taken.held_up(waited))
        metrics.sum("perf/train_s", self.options.sim_train_seconds)
        metrics.update(self.publishing.take())
        metrics.sum("perf/response_tokens", int(tensors.response_lens.sum()))
        self.report_trained(batch, metrics)
        groups = [lease.group for lease in message.leases]
        self.log.info("batch_trained", batch=batch, version=batch + 1, groups=groups)
        if (batch + 1) % self.options.update_weights_interval == 0:
            await self._offer(batch + 1, self._trained_at)

    # --- weights -----------------------------------------------------------------------------------------------------

    async def _offer(self, version: int, at: float) -> None:
        self._offered_at[version] = at
        await self.publishing.offer(version, version * self.options.num_steps_per_rollout, changed=True)

    async def _stage(self, place: int) -> None:
        """What a version holds follows from its number."""

    async def _publish(self, staged: Staged) -> Manifest:
        begun = max(self._offered_at[staged.version], self._published_at)
        self._offered_at = {version: at for version, at in self._offered_at.items() if version > staged.version}
        self._published_at = begun + self.options.sim_publish_seconds
        await _until(self._published_at)
        weights = [("simulated.version", np.full(WEIGHTS, staged.version, np.float32))]
        publish, wait = self.publisher.publish, self.options.peer_timeout
        return await asyncio.to_thread(publish, staged.version, staged.step, weights, wait=wait)

    async def _published(self, staged: Staged, manifest: Manifest) -> None:
        self.counters["published"] = staged.version
        await self.tell(self.context.controller, Published(staged.version, manifest.to_json()))

    async def on_fetch_chunk(self, message: FetchChunk, sender: Any) -> Chunk:
        data = await asyncio.to_thread(self.store.read_chunk, message.digest)
        return Chunk(np.frombuffer(data or b"", np.uint8))

    # --- the end -----------------------------------------------------------------------------------------------------

    async def on_finish(self, message: Finish, sender: Any) -> Finished:
        """There is no model to export."""
        async with self.busy:
            last = self.version.value
            if self.publishing.offered != last:
                await self._offer(last, time.monotonic())
            self.activity = f"publishing version {last}"
            await self.publishing.published.wait(last, self.options.stall_timeout)
        return Finished(last, "")


class _Copies:
    """The state is a number: how many batches are trained."""

    def __init__(self) -> None:
        self._batch = -1

    async def take(self, batch: int) -> None:
        self._batch = batch

    async def write(self, part: Path) -> str:
        def write() -> None:
            part.mkdir()
            (part / STATE).write_text(f"{self._batch}\n")
            Writing(self._batch, part.parent).close_part(part.name)

        try:
            await asyncio.to_thread(write)
        except OSError as error:
            return str(error)
        return ""

    async def drop(self) -> None:
        """There is nothing to let go."""


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))
