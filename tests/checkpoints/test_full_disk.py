"""A disk that is full while a checkpoint is written: said clearly, and what was there before still loads."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from relax.checkpoints import CheckpointDirectory, NoRoomError
from relax.ledger import GroupBook, Ledger
from relax.ledger.resume import resume
from relax.services.control.saving import LEDGER, LEDGER_FILE, Saving

KIB = 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 400 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_checkpoint_that_does_not_fit_is_named_and_the_one_before_loads(tmp_path: Path, disk: Path) -> None:
    directory, book = CheckpointDirectory(disk / "checkpoints"), GroupBook()

    async def run(ledger: Ledger) -> None:
        it = Saving(directory, [], lambda role, save: None, run_id="r", lineage=0, options="")  # type: ignore[arg-type,return-value]
        assert await it.write(0, ledger) is not None
        for group in range(9000):
            book.draw(group, group, 0, group)
        book.commit(0, [])
        book.started(0)
        book.trained(0)
        assert book.save(ledger)
        with capture_logs() as logs:
            assert await it.write(1, ledger) is None
        (entry,) = logs
        assert entry["event"] == "checkpoint_not_written" and "database or disk is full" in entry["error"]
        assert book.save(ledger)
        ledger.flush(10)

    with Ledger(tmp_path / "ledger.sqlite", run_id="r") as ledger:
        asyncio.run(run(ledger))
        assert ledger.path.stat().st_size > 0, "the ledger itself lives on"
    assert [path.name for path in directory.path.iterdir()] == ["0"]
    newest = directory.newest()
    assert newest is not None and resume(newest.part(LEDGER) / LEDGER_FILE, 0).groups == ()
    with pytest.raises(NoRoomError, match=r"checkpoint 1 needs about 409600 bytes in .* and \d+ are free"):
        directory.begin(1, wanted=400 * KIB)
