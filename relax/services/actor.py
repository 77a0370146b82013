"""The actor service: trains the policy on the batches it is sent and publishes its weights.

Receives `TrainBatch` from advantages; sends `Started`, `Trained` and `Published` to the controller. Its model is on
Megatron ranks, of which rank 0 holds the mailbox and leads the others, or simulated. One thread touches the live model;
another one publishes what was staged; the mailbox keeps beating while they work.
"""

import asyncio
import time
from typing import Any

import numpy as np

from relax.metrics import Metrics
from relax.protocol.messages import Chunk, FetchChunk, Finish, Finished, Published, Started
from relax.services.models.base import PolicyModel, Taken, Weights
from relax.services.models.registry import policy
from relax.services.publishing import Publishing, Staged
from relax.services.service import Context
from relax.services.trainer import Trainer
from relax.weights.manifest import Manifest
from relax.weights.publication import Publisher
from relax.weights.store import ChunkStore


class Actor(Trainer):
    role = "actor"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.model: PolicyModel = policy(self)
        self._publication_s = 0.0
        self._offered_steps = -1  # of the weights that were offered for publication

    def handlers(self) -> dict[type, Any]:
        return super().handlers() | {Finish: self.on_finish, FetchChunk: self.on_fetch_chunk}

    async def begin(self) -> None:
        self.store = ChunkStore(self.run.shm_dir, create=True)
        self.publisher = Publisher(
            self.store,
            run_id=self.run.run_id,
            lineage=self.lineage,
            manifests=self.run.weights_dir,
            expected=self.model.shapes,
        )
        self.publishing = Publishing(self.model.stage, self._publish, self._published)
        self.spawn(self.publishing.run(), "publishing")
        await self._offer(self.context.cut)

    # --- training ----------------------------------------------------------------------------------------------------

    def learns_from(self, batch: int) -> bool:
        return batch >= self.options.num_critic_only_steps

    def begins(self, taken: Taken) -> None:
        self.report(Started(taken.message.batch, taken.message.commit))

    def account(self, metrics: Metrics, taken: Taken, waited: float, seconds: float) -> None:
        metrics.sum("perf/trainer_wait_s/batch", waited - taken.held_up(waited))
        metrics.sum("perf/trainer_wait_s/publication", self._publication_s)
        metrics.sum("perf/trainer_wait_s/payload", taken.held_up(waited))
        metrics.sum("perf/train_s", seconds)
        metrics.update(self.publishing.take())

    async def ended(self, batch: int) -> None:
        if (batch + 1) % self.options.update_weights_interval == 0:
            await self._offer(batch + 1)

    # --- weights -----------------------------------------------------------------------------------------------------

    async def _offer(self, version: int) -> None:
        """The present weights are to be published as `version`; the trainer waits until they are staged, no longer."""
        started = time.monotonic()
        self.activity = f"staging version {version}"
        changed, self._offered_steps = self.steps != self._offered_steps, self.steps
        await self.publishing.offer(version, self.steps, changed=changed)
        self._publication_s = time.monotonic() - started  # reported with the next batch

    async def _publish(self, staged: Staged) -> Manifest:
        def publish(weights: Weights | None) -> Manifest:
            return self.publisher.publish(staged.version, staged.step, weights, wait=self.options.stall_timeout)

        return await self.model.read(staged.place, publish)

    async def _published(self, staged: Staged, manifest: Manifest) -> None:
        self.counters["published"] = staged.version
        await self.tell(self.context.controller, Published(staged.version, manifest.to_json()))

    async def on_fetch_chunk(self, message: FetchChunk, sender: Any) -> Chunk:
        data = await asyncio.to_thread(self.store.read_chunk, message.digest)
        return Chunk(np.frombuffer(data or b"", np.uint8))

    # --- the end -----------------------------------------------------------------------------------------------------

    async def on_finish(self, message: Finish, sender: Any) -> Finished:
        async with self.busy:
            last = self.version.value
            if self.publishing.offered != last:
                await self._offer(last)
            self.activity = f"publishing version {last}"
            await self.reached(self.publishing.published, last, f"is to publish version {last}")
            self.activity = "writing the export"
            self.run.set_aside_export()
            return Finished(last, await self.model.export(self.run.export_dir))
