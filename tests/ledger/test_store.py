"""The ledger on disk: whole turns, readable while it is written and after any death."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax.ledger import GroupBook, Ledger, LedgerError, State
from relax.ledger.changes import Changes
from relax.ledger.queries import conservation, oldest_open, read, trained_prompts
from relax.ledger.records import GroupRecord


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite", run_id="r1") as ledger:
        yield ledger


def make_ready(book: GroupBook, group: int, version: int = 0) -> None:
    book.draw(group, prompt_id=group % 10, epoch=group // 10, position=group % 10)
    lease = book.issue(group, "rollout-0", version)
    for state in (State.SAMPLED, State.SCORED, State.READY):
        book.advance(lease, state, oldest=version, tokens=8, location="advantages-0")


def train(book: GroupBook, batch: int, groups: list[int]) -> None:
    book.commit(batch, groups)
    book.started(batch)
    book.trained(batch)


def test_any_sqlite_tool_reads_the_life_of_a_group(ledger: Ledger) -> None:
    book = GroupBook()
    make_ready(book, 0, version=2)
    train(book, 3, [0])
    book.published(4, step=8, digest="ab", size=123, created_at=1.0)
    book.save(ledger)
    ledger.flush(10)
    connection = sqlite3.connect(ledger.path)
    connection.row_factory = sqlite3.Row
    (row,) = map(dict, connection.execute("SELECT * FROM groups"))
    times = [row[f"{state}_at"] for state in ("drawn", "issued", "sampled", "scored", "ready", "committed", "ended")]
    assert times == sorted(times)
    assert row["first_issued_at"] == row["issued_at"]
    expected = {"state": "trained", "batch": 3, "version": 2, "oldest": 2, "tokens": 8, "holder": "rollout-0"}
    assert expected.items() <= row.items()
    assert tuple(connection.execute("SELECT batch, size, oldest FROM batches").fetchone()) == (3, 1, 2)
    assert tuple(connection.execute("SELECT version, step, digest, bytes FROM versions").fetchone()) == (
        4,
        8,
        "ab",
        123,
    )
    assert dict(connection.execute("SELECT key, value FROM meta").fetchall())["run_id"] == "r1"
    connection.close()


def test_lost_leases_taken_back_commits_drops_and_stale_reports_are_on_record(ledger: Ledger) -> None:
    book = GroupBook()
    make_ready(book, 0)
    zombie = book.lease(0)
    book.commit(0, [0])
    book.take_back(0)
    book.lost(0, "rollout-0 died")
    book.check(zombie)
    book.issue(0, "rollout-1", 0)
    book.drop(0, "straggler", batch=0, again=True)
    book.save(ledger)
    ledger.flush(10)
    connection = read(ledger.path)
    events = connection.execute("SELECT event, state, holder, fence, batch, detail FROM events ORDER BY event_id")
    assert events.fetchall() == [
        ("taken_back", "committed", "rollout-0", 1, 0, None),
        ("lost", "ready", "rollout-0", 1, None, "rollout-0 died"),
    ]
    draws = connection.execute("SELECT attempt, state, reason, fence, holder FROM groups ORDER BY attempt").fetchall()
    assert draws == [(0, "dropped", "straggler", 2, "rollout-1"), (1, "pending", None, 2, None)]
    assert connection.execute("SELECT name, value FROM counters").fetchall() == [("stale/lost", 1)]
    assert connection.execute("SELECT size, committed_at FROM batches").fetchall() == [(0, None)]
    assert [(group, attempt, state) for group, attempt, state, *_ in oldest_open(connection)] == [(0, 1, "pending")]
    connection.close()


def test_disk_agrees_with_the_book(ledger: Ledger) -> None:
    book = GroupBook()
    for group in range(40):
        make_ready(book, group)
        if group % 7 == 3:
            book.drop(group, "filtered", batch=group // 10)
        if group % 7 == 5:
            book.lost(group)
        if group % 10 == 9:
            train(book, group // 10, book.in_state(State.READY))
        book.save(ledger)
    book.save(ledger)
    ledger.flush(10)
    connection = read(ledger.path)
    assert conservation(connection) == book.conservation()
    assert conservation(connection).holds
    (issued, trained, dropped, flying) = connection.execute(
        "SELECT issued, trained, dropped, in_flight FROM conservation"
    ).fetchone()
    assert issued == trained + dropped + flying == 40
    connection.close()


def test_a_turn_is_one_transaction(ledger: Ledger) -> None:
    seen: set[tuple[int, int]] = set()
    stop = threading.Event()

    def watch() -> None:
        connection = read(ledger.path)
        while not stop.is_set():
            seen.add(connection.execute("SELECT count(*), coalesce(sum(state = 'ready'), 0) FROM groups").fetchone())
        connection.close()

    watcher = threading.Thread(target=watch)
    watcher.start()
    book = GroupBook()
    for turn in range(100):
        for group in range(turn * 10, turn * 10 + 10):
            make_ready(book, group)
        book.save(ledger)
    ledger.flush(10)
    stop.set()
    watcher.join(10)
    assert all(rows % 10 == 0 and rows == ready for rows, ready in seen)


def test_existing_ledger_is_refused(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match=r"ledger\.sqlite exists: it is the ledger of another run"):
        Ledger(ledger.path)


def test_ledger_in_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot be created: No such file or directory"):
        Ledger(tmp_path / "nowhere" / "ledger.sqlite")


def test_reading_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="does not exist"):
        read(tmp_path / "ledger.sqlite")
    sqlite3.connect(tmp_path / "other.sqlite").execute("CREATE TABLE t (x)").connection.close()
    with pytest.raises(LedgerError, match="has no tables of a ledger"):
        read(tmp_path / "other.sqlite")


def test_changes_wait_in_the_book_while_the_writer_is_behind(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, room=1)
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    book = GroupBook()
    turns = 0
    while ledger.has_room():
        make_ready(book, turns)
        book.save(ledger)
        turns += 1
    make_ready(book, turns)
    train(book, 0, [turns])
    book.save(ledger)
    with pytest.raises(LedgerError, match=r"has not been written after 0\.05 s"):
        ledger.flush(0.05)
    blocker.execute("ROLLBACK")
    blocker.close()
    ledger.flush(10)
    book.save(ledger)
    ledger.close()
    connection = read(path)
    assert conservation(connection).trained == 1
    assert conservation(connection) == book.conservation()
    connection.close()


def test_a_writer_that_stays_behind_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path, room=0, stall_timeout=0.0)
    assert not ledger.has_room()
    with pytest.raises(LedgerError, match=r"has not been written for 0 s .* is its disk, which must be local, stuck\?"):
        while True:
            ledger.has_room()
    ledger.close()


def test_full_disk_is_an_error_that_names_the_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger._connection.execute("PRAGMA max_page_count = 1")  # SQLite's own way of being full
    book = GroupBook()
    for group in range(2000):
        make_ready(book, group)
    book.save(ledger)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite cannot be written: database or disk is full"):
        ledger.flush(10)
    with pytest.raises(LedgerError, match="disk is full"):
        book.save(ledger)
    with pytest.raises(LedgerError, match="disk is full"):
        ledger.close()
    assert not ledger._thread.is_alive()


def test_the_database_refuses_a_group_trained_twice(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    twice = [GroupRecord(0, attempt, 0, 0, 0, 0.0, state=State.TRAINED).row(0) for attempt in (0, 1)]
    ledger.write(Changes(groups=twice))
    with pytest.raises(LedgerError, match="UNIQUE constraint failed"):
        ledger.flush(10)
    with pytest.raises(LedgerError, match="UNIQUE constraint failed"):
        ledger.close()


def test_closed_ledger_has_no_thread_and_takes_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.write(Changes(counters=[(0, "x", 1)]))
    ledger.close()
    ledger.close()
    assert not ledger._thread.is_alive()
    with pytest.raises(LedgerError, match="is closed"):
        ledger.write(Changes())
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.sqlite"], "the write-ahead log is folded in"


KILLED = """
import sys
from pathlib import Path
from relax.ledger import GroupBook, Ledger, State
book, ledger, group, batch = GroupBook(), Ledger(Path(sys.argv[1])), 0, 0
while True:
    for group in range(group, group + 4):
        book.draw(group, group, 0)
        lease = book.issue(group, "rollout-0", 0)
        book.advance(lease, State.READY)
    group += 1
    book.commit(batch, book.in_state(State.READY))
    book.trained(batch)
    batch += 1
    book.draw(group, group, 0)
    book.issue(group, "rollout-0", 0)
    group += 1
    book.save(ledger)
    if batch == 50:
        ledger.flush(10)
        print("half way", flush=True)
"""


def test_ledger_of_a_killed_controller_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"half way\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait(10)
    child.stdout.close()
    connection = read(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    counts = conservation(connection)
    assert counts.holds
    assert counts.trained >= 200
    assert counts.trained == 4 * counts.in_flight[State.ISSUED], "a turn is there as a whole or not at all"
    connection.close()


def test_trained_prompts_follow_the_lineages_of_a_resume(ledger: Ledger) -> None:
    first = GroupBook(0)
    for batch in range(3):
        make_ready(first, batch)
        train(first, batch, [batch])
    first.save(ledger)
    second = GroupBook(1)  # cut at batch 2: group 2 is pending again
    make_ready(second, 2)
    make_ready(second, 3)
    train(second, 2, [3])
    second.save(ledger)
    ledger.flush(10)
    with sqlite3.connect(ledger.path) as connection:
        connection.execute("INSERT INTO lineages VALUES (1, 0, 2, 0.0)")
    connection.close()
    connection = read(ledger.path)
    assert trained_prompts(connection) == [(0, 0), (1, 0), (3, 0)]
    assert conservation(connection).in_flight == {State.READY: 1}
    assert conservation(connection, lineage=0).trained == 3
    connection.close()


def test_the_ledger_imports_no_torch() -> None:
    code = "import sys, relax.ledger, relax.ledger.queries; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
