"""When a trained model is copied for a checkpoint, and what is answered when it is asked for."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from relax.protocol.messages import Save, Saved
from relax.services.keeping import Keeping
from relax.services.milestone import Milestone
from relax.services.watchdog import Watchdog


class Model:
    """Its state is the number of batches that it trained."""

    def __init__(self) -> None:
        self.trained = 0
        self.copy: int | None = None
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.problem = ""

    async def take(self, batch: int) -> None:
        assert self.copy is None, "the copy before is written or dropped"
        self.copy = self.trained

    async def write(self, part: Path) -> str:
        await self.go_on.wait()
        copied, self.copy = self.copy, None
        if not self.problem:
            await asyncio.to_thread(part.write_text, str(copied))
        return self.problem

    async def drop(self) -> None:
        self.copy = None


class Trainer:
    def __init__(self, folder: Path, interval: int | None) -> None:
        self.folder, self.model, self.version, self.busy = folder, Model(), Milestone(), asyncio.Lock()
        watchdog = Watchdog(60.0, lambda problem: None)
        self.keeping = Keeping(self.model, "actor", folder, interval, self.version, watchdog)
        self.version.reach(0)

    async def train(self, batches: int) -> None:
        for _ in range(batches):
            async with self.busy:
                self.model.trained += 1
                await self.keeping.trained(self.model.trained)
                self.version.reach(self.model.trained)

    async def save(self, cut: int, *, make: bool = True) -> Saved:
        if make:
            (self.folder / f"{cut}.partial").mkdir(exist_ok=True)
        return await self.keeping.save(Save(cut, f"{cut}.partial"), self.busy)

    def saved(self, cut: int) -> str:
        return (self.folder / f"{cut}.partial" / "actor").read_text()


def play(folder: Path, interval: int | None, work: Callable[[Trainer], Awaitable[Any]]) -> None:
    async def run() -> None:
        await work(Trainer(folder, interval))

    asyncio.run(run())


def test_what_is_written_is_the_state_at_the_cut_however_far_the_training_is(tmp_path: Path) -> None:
    async def work(trainer: Trainer) -> None:
        await trainer.train(3)
        assert await trainer.save(2) == Saved(2, "") and trainer.saved(2) == "2"

    play(tmp_path, 2, work)


def test_without_an_interval_the_present_state_is_copied_when_it_is_asked_for(tmp_path: Path) -> None:
    async def work(trainer: Trainer) -> None:
        await trainer.train(3)
        assert trainer.model.copy is None
        assert await trainer.save(3) == Saved(3, "") and trainer.saved(3) == "3"
        gone = await trainer.save(2)
        assert gone.problem == "the state after batch 1 is gone: batch 3 is next"

    play(tmp_path, None, work)


def test_a_copy_that_is_being_written_is_not_disturbed(tmp_path: Path) -> None:
    async def work(trainer: Trainer) -> None:
        await trainer.train(1)
        trainer.model.go_on.clear()
        first = asyncio.ensure_future(trainer.save(1))
        await asyncio.sleep(0.02)
        await trainer.train(1)
        # The controller gives the second one up, which takes nothing from the first.
        assert await trainer.keeping.save(Save(2, ""), trainer.busy) == Saved(2, "")
        trainer.model.go_on.set()
        assert await first == Saved(1, "") and trainer.saved(1) == "1"
        assert await trainer.save(2) == Saved(2, "") and trainer.saved(2) == "2", "it stands there still"

    play(tmp_path, 1, work)


def test_a_cut_that_is_given_up_makes_room_for_the_next(tmp_path: Path) -> None:
    async def work(trainer: Trainer) -> None:
        await trainer.train(2)
        await trainer.keeping.save(Save(2, ""), trainer.busy)
        assert trainer.model.copy is None
        await trainer.train(2)
        assert await trainer.save(4) == Saved(4, "") and trainer.saved(4) == "4"

    play(tmp_path, 2, work)


def test_a_copy_that_nobody_asked_for_makes_way_for_the_last_one(tmp_path: Path) -> None:
    async def work(trainer: Trainer) -> None:
        await trainer.train(3)
        assert trainer.model.copy == 2
        assert await trainer.save(3) == Saved(3, "") and trainer.saved(3) == "3"

    play(tmp_path, 2, work)


def test_a_copy_that_is_never_asked_for_costs_one_checkpoint_and_not_all_that_follow(tmp_path: Path) -> None:
    """The controller heard of two batches at once and asks for the later cut; the trainer never stands still."""

    async def ask_while_the_next_batch_is_trained(trainer: Trainer, cut: int) -> Saved:
        async with trainer.busy:
            asked = asyncio.ensure_future(trainer.save(cut))
            await asyncio.sleep(0)
            trainer.model.trained += 1
            await trainer.keeping.trained(cut + 1)
            trainer.version.reach(cut + 1)
        return await asked

    async def work(trainer: Trainer) -> None:
        await trainer.train(2)
        assert "is gone" in (await ask_while_the_next_batch_is_trained(trainer, 2)).problem
        assert await ask_while_the_next_batch_is_trained(trainer, 3) == Saved(3, "") and trainer.saved(3) == "3"

    play(tmp_path, 1, work)


def test_a_copy_of_a_later_cut_is_kept_for_it(tmp_path: Path) -> None:
    async def work(trainer: Trainer) -> None:
        await trainer.train(2)
        assert "is gone" in (await trainer.save(1)).problem
        await trainer.train(1)
        assert await trainer.save(2) == Saved(2, "") and trainer.saved(2) == "2"

    play(tmp_path, 2, work)


def test_a_directory_that_is_not_there_and_a_disk_that_refuses_are_told(tmp_path: Path) -> None:
    async def work(trainer: Trainer) -> None:
        await trainer.train(1)
        told = await trainer.save(1, make=False)
        assert "1.partial is not there: the hosts of controller and actor must share it" in told.problem
        trainer.model.problem = "no space left"
        assert await trainer.save(1) == Saved(1, "no space left")
        trainer.model.problem = ""
        assert await trainer.save(1) == Saved(1, "")

    play(tmp_path, 1, work)
