"""Checkpoints of a run as the controller sees to them: models that write, fail or do not answer."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from relax.checkpoints import CheckpointDirectory, Writing
from relax.ledger import GroupBook, Ledger
from relax.ledger.resume import resume
from relax.protocol.errors import PeerSilent
from relax.protocol.messages import Save, Saved
from relax.services.control.saving import Saving

ROLES = ("actor", "critic")


class Models:
    """What the actor and the critic do when they are asked."""

    def __init__(self, directory: CheckpointDirectory) -> None:
        self.directory = directory
        self.asked: list[tuple[str, int, str]] = []
        self.both_asked, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()
        self.problem = ""
        self.silent = False

    async def __call__(self, role: str, save: Save) -> Saved:
        self.asked.append((role, save.batch, save.directory))
        if len(self.asked) == len(ROLES):
            self.both_asked.set()
        if not save.directory:
            return Saved(save.batch, "")
        await self.go_on.wait()
        if role == "critic" and self.silent:
            raise PeerSilent("critic-0", "Save", 60.0)
        if role == "critic" and self.problem:
            return Saved(save.batch, self.problem)
        writing = Writing(save.batch, self.directory.path / save.directory)
        writing.part(role).mkdir()
        (writing.part(role) / "weights").write_text(f"{role} {save.batch}")
        writing.close_part(role)
        return Saved(save.batch, "")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite", run_id="r") as ledger:
        yield ledger


def train(ledger: Ledger, batches: int) -> None:
    book = GroupBook()
    for batch in range(batches):
        book.commit(batch, [])
        book.started(batch)
        book.trained(batch)
    assert book.save(ledger)


def saving(tmp_path: Path, work: Callable[[Saving, Models], Awaitable[Any]], **chosen: Any) -> tuple[Saving, Models]:
    async def run() -> tuple[Saving, Models]:
        directory = CheckpointDirectory(tmp_path / "checkpoints")
        models = Models(directory)
        settings = {"run_id": "r", "lineage": 1, "options": "abc", "interval": 5} | chosen
        it = Saving(directory, ROLES, models, **settings)
        await work(it, models)
        return it, models

    return asyncio.run(run())


def test_a_checkpoint_holds_the_models_and_a_ledger_that_can_be_resumed(tmp_path: Path, ledger: Ledger) -> None:
    train(ledger, 5)

    async def work(it: Saving, models: Models) -> None:
        made = await it.write(5, ledger)
        assert made is not None and set(made.parts) == {"ledger", *ROLES}
        assert (made.batch, made.lineage, made.options) == (5, 1, "abc")
        assert resume(made.part("ledger") / "ledger.sqlite", 5).cut == 5
        assert models.directory.newest() == made

    it, models = saving(tmp_path, work)
    assert it.failed == 0 and [(role, batch) for role, batch, _ in models.asked] == [("actor", 5), ("critic", 5)]


def test_a_checkpoint_is_due_at_multiples_of_its_interval_even_when_a_turn_misses_them(tmp_path: Path) -> None:
    async def nothing(it: Saving, models: Models) -> None: ...

    it, _ = saving(tmp_path, nothing, first_batch=10)
    assert [it.due(version) for version in (10, 14, 15, 16, 23)] == [None, None, 15, 15, 20]
    it.last = 15
    assert it.due(19) is None and it.due(20) == 20
    it, _ = saving(tmp_path, nothing, interval=None)
    assert it.due(1000) is None


@pytest.mark.parametrize(("problem", "silent"), [("rank 1: No space left on device", False), ("", True)])
def test_a_part_that_is_missing_is_named_and_the_run_does_without(
    tmp_path: Path, ledger: Ledger, problem: str, silent: bool
) -> None:
    train(ledger, 10)

    async def work(it: Saving, models: Models) -> None:
        assert await it.write(5, ledger) is not None
        models.problem, models.silent = problem, silent
        with capture_logs() as logs:
            assert await it.write(10, ledger) is None
        (entry,) = logs
        assert entry["event"] == "checkpoint_not_written" and entry["log_level"] == "error"
        assert entry["error"].startswith("critic: ") and (problem or "did not acknowledge") in entry["error"]
        newest = models.directory.newest()
        assert newest is not None and newest.batch == 5
        assert [path.name for path in models.directory.path.iterdir()] == ["5"], "nothing is left of it"
        models.problem, models.silent = "", False
        assert await it.write(10, ledger) is not None, "the next one is none the worse for it"

    it, _ = saving(tmp_path, work)
    assert it.failed == 1


def test_a_ledger_that_cannot_be_copied_is_named(tmp_path: Path, ledger: Ledger) -> None:
    async def work(it: Saving, models: Models) -> None:
        with capture_logs() as logs:
            assert await it.write(5, ledger) is None
        assert "controller: " in logs[0]["error"] and "its time was over" in logs[0]["error"]

    saving(tmp_path, work, deadline=-1.0)


def test_without_room_nobody_writes_and_the_models_forget(tmp_path: Path, ledger: Ledger) -> None:
    (tmp_path / "checkpoints").write_text("in the way")

    async def work(it: Saving, models: Models) -> None:
        with capture_logs() as logs:
            assert await it.write(5, ledger) is None
        assert "checkpoint 5 cannot be begun" in logs[0]["error"]
        assert models.asked == [("actor", 5, ""), ("critic", 5, "")]

    saving(tmp_path, work)


def test_one_is_written_at_a_time_and_the_last_one_waits_for_its_turn(tmp_path: Path, ledger: Ledger) -> None:
    train(ledger, 15)

    async def work(it: Saving, models: Models) -> None:
        models.go_on.clear()
        first = asyncio.ensure_future(it.write(5, ledger))
        await models.both_asked.wait()
        with capture_logs() as logs:
            assert await it.write(10, ledger) is None
        assert "the one before is still being written" in logs[0]["error"]
        assert models.asked[2:] == [("actor", 10, ""), ("critic", 10, "")]
        last = asyncio.ensure_future(it.write(15, ledger, wait=True))
        await asyncio.sleep(0.02)
        models.go_on.set()
        made = await asyncio.gather(first, last)
        assert [one and one.batch for one in made] == [5, 15]

    saving(tmp_path, work)


def test_a_directory_that_leads_elsewhere_is_no_directory() -> None:
    with pytest.raises(ValueError, match=r"the checkpoint directory '\.\./x' can be no file name"):
        Save(5, "../x")
