"""What actor and critic have in common: they train on every batch of the run, one after the other, in order."""

import asyncio
import itertools
import time
from collections.abc import Iterable
from typing import Any

from relax.metrics import Metrics
from relax.protocol.errors import PayloadGone, PeerForgotten
from relax.protocol.messages import Lease, Save, Saved, TrainBatch, Trained, Withdraw, Withdrawn
from relax.protocol.payload import PayloadStore
from relax.protocol.tensors import TrainTensors
from relax.services.keeping import Keeping
from relax.services.milestone import Milestone
from relax.services.models.base import Taken, TrainerModel
from relax.services.service import Context, Service, ServiceError


class Trainer(Service):
    """A service that takes `TrainBatch` from advantages and trains its `model` on it. A subclass has the model, and
    says what else belongs to a batch: before it (`begins`), in its row (`account`), after it (`ended`).

    A batch is fetched as soon as it is heard of and trained once it is here as a whole, so advantages may die from then
    on. If it dies before, the controller asks (`Withdraw`) and learns that the batch was forgotten.
    """

    model: TrainerModel

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.steps = 0  # that the optimizer has taken
        self.version = Milestone()  # the number of batches that are trained
        # One batch may be committed ahead of the one in training; a third in the queue would break the protocol.
        self.batches: asyncio.Queue[Taken] = asyncio.Queue(2)
        self.busy = asyncio.Lock()
        self._leases: dict[int, tuple[Lease, ...]] = {}  # batch -> its draws, until the controller knows it is trained
        self._coming: dict[int, int] = {}  # batch -> commit under which its tensors are being fetched
        self._here: dict[int, int] = {}  # batch -> commit of those that are here as a whole and not trained yet
        self._withdrawn = -1  # the newest commit that was withdrawn; they come in order, and so none below is wanted

    def handlers(self) -> dict[type, Any]:
        self.payloads = PayloadStore(self.mailbox)
        return {TrainBatch: self.on_train_batch, Withdraw: self.on_withdraw, Save: self.on_save}

    def learns_from(self, batch: int) -> bool:
        """Whether the model trains on the batch, or passes it by."""
        return True

    def begins(self, taken: Taken) -> None:
        """The batch is about to be trained."""

    def account(self, metrics: Metrics, taken: Taken, waited: float, seconds: float) -> None:
        """Adds to the row of a batch: the trainer `waited` for it and then trained for so many `seconds`."""
        raise NotImplementedError

    async def ended(self, batch: int) -> None:
        """The batch is trained and that is reported."""

    async def prepare(self) -> None:
        """The model is brought up as the life of the run begins with it; from then on batches are trained."""
        o, checkpoint = self.options, self.context.checkpoint
        self.activity = "building the model"
        await self.model.build(self.num_batches)
        if checkpoint is not None:
            self.activity = "loading the checkpoint"
            self.steps = await self.model.load(checkpoint / self.role)
        interval = o.save_interval if o.save else None
        if interval is not None:
            self.gauges["checkpoint_bytes"] = await self.model.reserve()
        copies, where = self.model.copies, self.run.checkpoints_dir
        self.keeping = Keeping(copies, self.role, where, interval, self.version, self.watchdog)
        await self.begin()
        self.version.reach(self.context.cut)
        self.spawn(self._train_batches(), "training")

    async def begin(self) -> None:
        """What is still to be done before the first batch."""

    async def release(self) -> None:
        await self.model.close(self.clean)

    def holds(self) -> Iterable[Lease]:
        return itertools.chain(*self._leases.values())

    # --- batches that come -------------------------------------------------------------------------------------------

    async def on_train_batch(self, message: TrainBatch, sender: Any) -> None:
        batch = message.batch
        if message.commit <= self._withdrawn:
            self.log.info("batch_refused", batch=batch, commit=message.commit, withdrawn=self._withdrawn)
            return
        if len(self._coming) + len(self._here) >= 2:
            raise ServiceError(f"batch {batch} came while {sorted(self._coming | self._here)} are not trained yet")
        self._leases[batch], self._coming[batch] = message.leases, message.commit
        self.spawn(self._take(message), f"batch {batch}")

    async def _take(self, message: TrainBatch) -> None:
        batch, arrived = message.batch, time.monotonic()
        try:
            arrays = await self.fetch(self.payloads, message.payload)
        except (PayloadGone, PeerForgotten) as gone:
            # Its sender died; the controller, which knows that too, is about to ask for the batch.
            self.log.warning("batch_gone", batch=batch, problem=str(gone))
            return
        if self._coming.get(batch) != message.commit:
            return
        tensors = TrainTensors.from_arrays(arrays, f"batch {batch}")
        self._here[batch] = self._coming.pop(batch)
        self.batches.put_nowait(Taken(message, tensors, arrived, time.monotonic() - arrived))

    async def on_withdraw(self, message: Withdraw, sender: Any) -> Withdrawn:
        batch = message.batch
        held = self.version.value > batch or self._here.get(batch) == message.commit
        if not held:
            self._withdrawn = max(self._withdrawn, message.commit)
            if self._coming.pop(batch, None) is not None:
                del self._leases[batch]
        self.log.info("batch_withdrawn", batch=batch, commit=message.commit, held=held)
        return Withdrawn(held)

    async def on_save(self, message: Save, sender: Any) -> Saved:
        return await self.keeping.save(message, self.busy)

    # --- training ----------------------------------------------------------------------------------------------------

    async def _report_trained(self, batch: int, metrics: Metrics) -> None:
        await self.tell(self.context.controller, Trained(batch, metrics.wire()))
        del self._leases[batch]

    async def _train_batches(self) -> None:
        while True:
            started = time.monotonic()
            self.activity = "waiting for a batch"
            taken = await self.batches.get()
            waited, batch = time.monotonic() - started, taken.message.batch
            if batch != self.version.value:
                raise ServiceError(
                    f"{self.name} was given batch {batch} to train and is at version {self.version.value}: "
                    "batch b is trained at version b, once"
                )
            async with self.busy:
                self.activity = f"training batch {batch}"
                await self._train(batch, taken, waited)
            del self._here[batch]

    async def _train(self, batch: int, taken: Taken, waited: float) -> None:
        metrics, seconds = Metrics(), 0.0
        self.begins(taken)
        if self.learns_from(batch):
            metrics, seconds = await self.model.train(taken)
            self.steps += self.options.num_steps_per_rollout
        # Before anybody hears of it: a checkpoint of this cut may be asked for as soon as somebody has.
        await self.keeping.trained(batch + 1)
        self.version.reach(batch + 1)
        self.account(metrics, taken, waited, seconds)
        self.spawn(self._report_trained(batch, metrics), f"batch {batch} is trained")
        groups = [lease.group for lease in taken.message.leases]
        self.log.info("batch_trained", batch=batch, version=batch + 1, seconds=round(seconds, 3), groups=groups)
        await self.ended(batch)
