"""The actor service: trains the policy on the batches it is sent and publishes its weights.

Receives `TrainBatch` from advantages; sends `Started`, `Trained` and `Published` to the controller. Rank 0 holds the
mailbox and leads the other ranks. One thread touches the model; another one publishes what was staged; the mailbox
keeps beating while they work.
"""

import asyncio
import time
from typing import Any

import numpy as np

from relax.metrics import Metrics
from relax.protocol.messages import Chunk, FetchChunk, Finish, Finished, Published, Started
from relax.services.actor_work import PUBLICATION, ActorWork
from relax.services.model_copies import ModelCopies, load_part
from relax.services.publishing import Publishing, Staged
from relax.services.ranks import Leader, Ranks
from relax.services.service import Context, ServiceError
from relax.services.trainer import Taken, Trainer
from relax.weights.checkpoint import checkpoint_shapes
from relax.weights.manifest import Manifest
from relax.weights.publication import Publisher
from relax.weights.store import ChunkStore


class Actor(Trainer):
    role = "actor"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.steps = 0
        self._publication_s = 0.0
        self._changed = True  # the weights, since they were offered for publication
        self._ranks: Ranks[ActorWork] = Ranks(self.role)

    def handlers(self) -> dict[type, Any]:
        return super().handlers() | {Finish: self.on_finish, FetchChunk: self.on_fetch_chunk}

    async def prepare(self) -> None:
        self.activity = "building the model"
        o = self.options
        own = None if self.num_batches is None else max(self.num_batches - o.num_critic_only_steps, 1)
        total = None if own is None else own * o.num_steps_per_rollout
        self._work = await self._ranks.build(ActorWork, o, total)
        self.spawn(self._ranks.keep(), "keeping the ranks")
        self.store = ChunkStore(self.run.shm_dir, create=True)
        self.publisher = Publisher(
            self.store,
            run_id=self.run.run_id,
            lineage=self.lineage,
            manifests=self.run.weights_dir,
            expected=checkpoint_shapes(o.hf_checkpoint),
        )
        self.publishing = Publishing(self._stage, self._publish, self._published)
        self.spawn(self.publishing.run(), "publishing")
        self.log.info("model_built", parameters=self._work.policy.num_parameters)
        if (checkpoint := self.context.checkpoint) is not None:
            self.activity = "loading the checkpoint"
            self.steps = (await load_part(self._ranks, self._work, checkpoint / self.role, self.context)).steps
        if o.save and o.save_interval is not None:
            self.gauges["checkpoint_bytes"] = await self._ranks.run(self._work.reserve_snapshot)
        await self._offer(self.context.cut)
        self.begin(ModelCopies(self._ranks, self._work))

    async def release(self) -> None:
        await self._ranks.close(self.clean)

    # --- training ----------------------------------------------------------------------------------------------------

    async def train(self, batch: int, taken: Taken, waited: float) -> None:
        started, tensors, message = time.monotonic(), taken.tensors, taken.message
        self.report(Started(batch, message.commit))
        metrics = Metrics()
        if batch >= self.options.num_critic_only_steps:
            metrics.update(await self._ranks.run(self._work.train, tensors.arrays()))
            self.steps += self.options.num_steps_per_rollout
            self._changed = True
        trained = time.monotonic()
        await self.keeping.trained(batch + 1)
        self.version.reach(batch + 1)
        metrics.sum("perf/trainer_wait_s/batch", waited - taken.held_up(waited))
        metrics.sum("perf/trainer_wait_s/publication", self._publication_s)
        metrics.sum("perf/trainer_wait_s/payload", taken.held_up(waited))
        metrics.sum("perf/train_s", trained - started)
        metrics.update(self.publishing.take())
        metrics.sum("perf/response_tokens", int(tensors.response_lens.sum()))
        self.report_trained(batch, metrics)
        groups = [lease.group for lease in message.leases]
        seconds = round(trained - started, 3)
        self.log.info("batch_trained", batch=batch, version=batch + 1, seconds=seconds, groups=groups)
        if (batch + 1) % self.options.update_weights_interval == 0:
            await self._offer(batch + 1)

    # --- weights -----------------------------------------------------------------------------------------------------

    async def _offer(self, version: int) -> None:
        """The present weights are to be published as `version`; the trainer waits until they are staged, no longer."""
        started = time.monotonic()
        self.activity = f"staging version {version}"
        changed, self._changed = self._changed, False
        await self.publishing.offer(version, self.steps, changed=changed)
        self._publication_s = time.monotonic() - started  # reported with the next batch

    async def _stage(self, place: int) -> None:
        await self._ranks.run(self._work.stage, place)

    async def _publish(self, staged: Staged) -> Manifest:
        def publish(ranks: Leader[ActorWork]) -> Manifest:
            tensors = None if staged.place is None else ranks.run(self._work.weights, staged.place)
            return self.publisher.publish(staged.version, staged.step, tensors, wait=self.options.peer_timeout)

        return await self._ranks.lead(publish, PUBLICATION)

    def _published(self, staged: Staged, manifest: Manifest) -> None:
        self.counters["published"] = staged.version
        self.report(Published(staged.version, manifest.to_json()))

    async def _is_published(self, version: int) -> None:
        limit = self.options.stall_timeout
        try:
            await self.publishing.published.wait(version, limit)
        except TimeoutError:
            done = self.publishing.published.value
            raise ServiceError(
                f"version {version} is not published after --stall-timeout {limit:g} s; the newest is {done}"
            ) from None

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
            await self._is_published(last)
            self.activity = "writing the export"
            await self._ranks.run(self._work.export, str(self.run.export_dir))
        return Finished(self.version.value, str(self.run.export_dir))
