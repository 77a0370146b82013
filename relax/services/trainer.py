"""What actor and critic have in common: they train on every batch of the run, one after the other, in order."""

import asyncio
import itertools
import time
from collections.abc import Iterable
from typing import Any

from relax.metrics import Metrics
from relax.protocol.messages import Lease, TrainBatch, Trained
from relax.protocol.payload import PayloadStore
from relax.protocol.tensors import TrainTensors
from relax.services.milestone import Milestone
from relax.services.service import Context, Service, ServiceError


class Trainer(Service):
    """A service that takes `TrainBatch` from advantages. A subclass trains (`train`) and says when it may begin
    (`begin`)."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.version = Milestone()  # the number of batches that are trained
        # One batch may be committed ahead of the one in training; a third in the queue would break the protocol.
        self.batches: asyncio.Queue[TrainBatch] = asyncio.Queue(2)
        self.busy = asyncio.Lock()
        self._leases: dict[int, tuple[Lease, ...]] = {}  # batch -> its draws, until the controller knows it is trained

    def handlers(self) -> dict[type, Any]:
        self.payloads = PayloadStore(self.mailbox)
        return {TrainBatch: self.on_train_batch}

    async def train(self, batch: int, message: TrainBatch, waited: float) -> None:
        """Train on one batch, `waited` seconds after the one before, and report it."""
        raise NotImplementedError

    def begin(self) -> None:
        """The model is there at version 0: from here on batches are trained."""
        self.version.reach(0)
        self.spawn(self._train_batches(), "training")

    def holds(self) -> Iterable[Lease]:
        return itertools.chain(*self._leases.values())

    async def on_train_batch(self, message: TrainBatch, sender: Any) -> None:
        self._leases[message.batch] = message.leases
        self.batches.put_nowait(message)

    def report_trained(self, batch: int, metrics: Metrics) -> None:
        """The batch's last optimizer step is done."""
        self.spawn(self._report_trained(batch, metrics), f"batch {batch} is trained")

    async def _report_trained(self, batch: int, metrics: Metrics) -> None:
        await self.tell(self.context.controller, Trained(batch, metrics.wire()))
        del self._leases[batch]

    async def tensors(self, message: TrainBatch) -> TrainTensors:
        """The arrays of a batch, from advantages and checked."""
        arrays = await self.payloads.fetch(message.payload, deadline=self.options.peer_timeout)
        return TrainTensors.from_arrays(arrays, f"batch {message.batch}")

    async def _train_batches(self) -> None:
        while True:
            started = time.monotonic()
            self.activity = "waiting for a batch"
            message = await self.batches.get()
            waited = time.monotonic() - started
            if message.batch != self.version.value:
                raise ServiceError(
                    f"{self.name} was given batch {message.batch} to train and is at version {self.version.value}: "
                    "batch b is trained at version b, once"
                )
            async with self.busy:
                self.activity = f"training batch {message.batch}"
                await self.train(message.batch, message, waited)
