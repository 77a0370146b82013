"""A copy of the ledger at a turn's end, while turns go on."""

import contextlib
import resource
import signal
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax.ledger import GroupBook, Ledger, LedgerError, State, copying, store
from relax.ledger.queries import read


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite", run_id="r") as ledger:
        yield ledger


def turn(book: GroupBook, ledger: Ledger, groups: range) -> None:
    for group in groups:
        book.draw(group, group, 0, group)
        book.issue(group, "rollout-0", 0)
    assert book.save(ledger)


def rows(path: Path) -> int:
    with contextlib.closing(read(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return int(connection.execute("SELECT count(*) FROM groups").fetchone()[0])


def test_the_copy_is_the_ledger_of_that_turn_in_one_file(ledger: Ledger, tmp_path: Path) -> None:
    book = GroupBook()
    turn(book, ledger, range(10))
    done = ledger.begin_backup(tmp_path / "copy" / "ledger.sqlite", 30)
    turn(book, ledger, range(10, 20))
    done.result(30)
    ledger.flush(10)
    assert rows(tmp_path / "copy" / "ledger.sqlite") == 10
    assert rows(ledger.path) == 20
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["ledger.sqlite"]


def test_turns_are_written_while_the_copy_is_made(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "PAGES", 1)
    book = GroupBook()
    turn(book, ledger, range(3000))
    ledger.flush(10)
    written: list[int] = []
    whole = store.copy_ledger

    def watched(path, to, between):  # type: ignore[no-untyped-def]
        def step(status: int, remaining: int, total: int) -> None:
            if remaining and len(written) < 50:
                start = 3000 + 5 * len(written)
                turn(book, ledger, range(start, start + 5))
                between(status, remaining, total)
                written.append(ledger._written)
            else:
                between(status, remaining, total)

        whole(path, to, step)

    monkeypatch.setattr(store, "copy_ledger", watched)
    ledger.backup(tmp_path / "copy", 60)
    assert rows(tmp_path / "copy") == 3000, "of the turn it was asked at, and never begun again"
    assert len(written) == 50 and written == list(range(written[0], written[0] + 50)), "each turn within one step"
    ledger.flush(10)
    assert rows(ledger.path) == 3250


def test_a_copy_that_takes_too_long_is_given_up_and_the_ledger_goes_on(ledger: Ledger, tmp_path: Path) -> None:
    book = GroupBook()
    turn(book, ledger, range(10))
    with pytest.raises(LedgerError, match=r"could not be copied to .*copy: its time was over"):
        ledger.backup(tmp_path / "copy", -1.0)
    turn(book, ledger, range(10, 20))
    ledger.flush(10)
    assert rows(ledger.path) == 20


@pytest.mark.parametrize("place", ["ledger.sqlite", "ledger.sqlite/below"])
def test_a_copy_that_cannot_be_written_is_an_error_and_the_ledger_goes_on(
    ledger: Ledger, tmp_path: Path, place: str
) -> None:
    book = GroupBook()
    with pytest.raises(LedgerError, match="could not be copied"):
        ledger.backup(tmp_path / place, 10)
    turn(book, ledger, range(10))
    ledger.flush(10)
    assert rows(ledger.path) == 10


def test_a_full_disk_ends_the_copy_and_not_the_ledger(ledger: Ledger, tmp_path: Path) -> None:
    book = GroupBook()
    turn(book, ledger, range(5000))
    ledger.flush(10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = ledger.path.stat().st_size
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 3, hard))  # SQLite hears of a disk that takes no more
    try:
        with pytest.raises(LedgerError, match=r"could not be copied to .*(full|disk I/O error)"):
            ledger.backup(tmp_path / "copy", 30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    turn(book, ledger, range(5000, 5010))
    ledger.flush(10)
    assert rows(ledger.path) == 5010


def test_a_closing_ledger_gives_up_its_copies(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    blocker = sqlite3.connect(ledger.path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    book = GroupBook()
    turn(book, ledger, range(10))
    done = ledger.begin_backup(tmp_path / "copy", 30)
    blocker.execute("ROLLBACK")
    blocker.close()
    ledger.close()
    assert done.done()
    assert done.exception() is None or "closed" in str(done.exception())
    with pytest.raises(LedgerError, match="is closed"):
        ledger.begin_backup(tmp_path / "other", 30)


@pytest.mark.parametrize("closing", [False, True])
def test_an_asker_that_ended_does_not_end_the_ledger(tmp_path: Path, closing: bool) -> None:
    """A run that is stopped while a checkpoint is being cut: what was queued is written all the same."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    blocker = sqlite3.connect(ledger.path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    book = GroupBook()
    turn(book, ledger, range(10))
    done = ledger.begin_backup(tmp_path / "copy", 30)
    assert done.cancel()
    turn(book, ledger, range(10, 20))
    closer = threading.Thread(target=ledger.close)
    if closing:
        closer.start()
    blocker.execute("ROLLBACK")
    blocker.close()
    if closing:
        closer.join(30)
    else:
        ledger.flush(10)
        ledger.close()
    assert rows(ledger.path) == 20


def test_what_waits_in_the_book_is_said_to_wait(tmp_path: Path) -> None:
    """A copy made now would be older than the book says."""
    ledger = Ledger(tmp_path / "ledger.sqlite", room=0)
    book = GroupBook()
    assert not book.save(ledger)
    book.draw(0, 0, 0)
    assert not book.save(ledger)
    assert book.in_state(State.PENDING) == [0]
    ledger.close()
