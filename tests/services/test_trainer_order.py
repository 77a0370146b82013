"""A trainer trains batch v at version v: a batch out of its turn or a second time ends it before it trains."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from relax.config.options import Options
from relax.protocol.messages import TrainBatch
from relax.protocol.payload import Payload, PayloadStore
from relax.services.models.base import Taken
from relax.services.service import Context, ServiceError
from relax.services.trainer import Trainer


@pytest.fixture(autouse=True)
def empty_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax.services.trainer.TrainTensors.from_arrays", lambda arrays, where: arrays)


class Recorder(Trainer):
    role = "actor"

    def __init__(self) -> None:
        options, run = Options(), SimpleNamespace(run_id="r")
        super().__init__(Context("actor-0", options, run, "", "", None, options))  # type: ignore[arg-type]
        self.trained: list[int] = []
        mailbox: Any = SimpleNamespace(on=lambda *args: None, endpoint="inproc://actor-0")
        self.payloads = PayloadStore(mailbox)

    async def _train(self, batch: int, taken: Taken, waited: float) -> None:
        self.trained.append(batch)
        self.version.reach(batch + 1)


async def give(trainer: Recorder, batches: list[int]) -> None:
    """Sends the batches one after the other and returns once they are trained; raises what training ends with."""
    trainer._ended = asyncio.get_running_loop().create_future()
    trainer.version.reach(0)
    training = asyncio.create_task(trainer._train_batches())
    sender: Any = SimpleNamespace(name="advantages-0")
    try:
        for batch in batches:
            await trainer.on_train_batch(TrainBatch(batch, batch, (), Payload.inline({})), sender)
            await asyncio.wait([training], timeout=0.01)
            if training.done():
                training.result()
    finally:
        training.cancel()


def test_batches_are_trained_in_their_order() -> None:
    trainer = Recorder()
    asyncio.run(give(trainer, [0, 1, 2]))
    assert trainer.trained == [0, 1, 2]


@pytest.mark.parametrize(
    ("batches", "trained"), [([0, 2, 1], [0]), ([0, 1, 1], [0, 1]), ([1], [])], ids=["ahead", "again", "first"]
)
def test_a_batch_out_of_its_turn_ends_the_trainer(batches: list[int], trained: list[int]) -> None:
    trainer = Recorder()
    wrong, version = batches[len(trained)], len(trained)
    with pytest.raises(ServiceError, match=f"was given batch {wrong} to train and is at version {version}"):
        asyncio.run(give(trainer, batches))
    assert trainer.trained == trained
