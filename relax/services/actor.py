"""The actor service: trains the policy on the batches it is sent and publishes its weights.

Receives `TrainBatch` from advantages; sends `Started`, `Trained` and `Published` to the controller. Rank 0 holds the
mailbox and leads the other ranks. One thread touches the model; the mailbox keeps beating while it works.
"""

import asyncio
import time
from typing import Any

import numpy as np

from relax.metrics import Metrics
from relax.protocol.messages import Chunk, FetchChunk, Finish, Finished, Published, Started, TrainBatch, Trained
from relax.protocol.payload import PayloadStore
from relax.protocol.tensors import TrainTensors
from relax.services.actor_work import ActorWork
from relax.services.ranks import Ranks
from relax.services.service import Context, Service
from relax.weights.checkpoint import checkpoint_shapes
from relax.weights.publication import Publisher
from relax.weights.store import ChunkStore


class Actor(Service):
    role = "actor"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.version = 0
        self.steps = 0
        self.published = -1
        self._publication_s = 0.0
        # One batch may be committed ahead of the one in training; a third in the queue would break the protocol.
        self.batches: asyncio.Queue[TrainBatch] = asyncio.Queue(2)
        self._ranks: Ranks[ActorWork] = Ranks(self.role)
        self._busy = asyncio.Lock()

    def handlers(self) -> dict[type, Any]:
        self.payloads = PayloadStore(self.mailbox)
        return {TrainBatch: self.on_train_batch, Finish: self.on_finish, FetchChunk: self.on_fetch_chunk}

    async def prepare(self) -> None:
        self.activity = "building the model"
        total = None if self.num_batches is None else self.num_batches * self.options.num_steps_per_rollout
        self._work = await self._ranks.build(ActorWork, self.options, total)
        self.spawn(self._ranks.keep(), "keeping the ranks")
        self.store = ChunkStore(self.run.shm_dir, create=True)
        self.publisher = Publisher(
            self.store,
            run_id=self.run.run_id,
            lineage=self.lineage,
            manifests=self.run.weights_dir,
            expected=checkpoint_shapes(self.options.hf_checkpoint),
        )
        self.log.info("model_built", parameters=self._work.policy.num_parameters)
        await self._publish()
        self.spawn(self._train_batches(), "training")

    async def release(self) -> None:
        await self._ranks.close(self.clean)

    # --- training ----------------------------------------------------------------------------------------------------

    async def on_train_batch(self, message: TrainBatch, sender: Any) -> None:
        self.batches.put_nowait(message)

    async def _train_batches(self) -> None:
        while True:
            started = time.monotonic()
            self.activity = "waiting for a batch"
            message = await self.batches.get()
            waited = time.monotonic() - started
            async with self._busy:
                await self._train(message, waited)

    async def _train(self, message: TrainBatch, waited: float) -> None:
        b = message.batch
        self.activity = f"training batch {b}"
        started = time.monotonic()
        self.report(Started(b))
        arrays = await self.payloads.fetch(message.payload, deadline=self.options.peer_timeout)
        tensors = TrainTensors.from_arrays(arrays, f"batch {b}")
        fetched = time.monotonic()
        metrics = Metrics(await self._ranks.run(self._work.train, tensors.arrays()))
        trained = time.monotonic()
        self.version, self.steps = b + 1, self.steps + self.options.num_steps_per_rollout
        metrics.sum("perf/trainer_wait_s/batch", waited)
        metrics.sum("perf/trainer_wait_s/publication", self._publication_s)
        metrics.sum("perf/trainer_wait_s/payload", fetched - started)
        metrics.sum("perf/train_s", trained - fetched)
        metrics.sum("perf/response_tokens", int(tensors.response_lens.sum()))
        self.report(Trained(b, metrics.wire()))
        self.log.info("batch_trained", batch=b, version=self.version, seconds=round(trained - fetched, 3))
        if self.version % self.options.update_weights_interval == 0:
            await self._publish()

    # --- weights -----------------------------------------------------------------------------------------------------

    async def _publish(self) -> None:
        """Store the present weights as the present version and tell the controller."""
        started, wait = time.monotonic(), self.options.peer_timeout
        self.activity = f"publishing version {self.version}"
        manifest = await self._ranks.lead(
            lambda ranks: self.publisher.publish(self.version, self.steps, ranks.run(self._work.weights), wait=wait)
        )
        self.published = self.version
        self.report(Published(self.version, manifest.to_json()))
        self._publication_s = time.monotonic() - started  # reported with the next batch

    async def on_fetch_chunk(self, message: FetchChunk, sender: Any) -> Chunk:
        data = await asyncio.to_thread(self.store.read_chunk, message.digest)
        return Chunk(np.frombuffer(data or b"", np.uint8))

    # --- the end -----------------------------------------------------------------------------------------------------

    async def on_finish(self, message: Finish, sender: Any) -> Finished:
        async with self._busy:
            if self.published != self.version:
                await self._publish()
            self.activity = "writing the export"
            await self._ranks.run(self._work.export, str(self.run.export_dir))
        return Finished(self.version, str(self.run.export_dir))
