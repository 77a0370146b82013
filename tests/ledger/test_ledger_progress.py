"""Where a run stands by its ledger: stages, the oldest group, rates; also while it is written."""

import contextlib
import itertools
import sqlite3
from pathlib import Path

import pytest

from relax.ledger import GroupBook, Ledger, LedgerError, State
from relax.ledger.progress import look
from relax.ledger.queries import NoLedger, read
from relax.ledger.resume import reopen, resume
from relax.ledger.schema import SCHEMA


def written(path: Path) -> None:
    """One second from act to act: four groups trained in two batches, one dropped, one ready, one sampling, one
    lost."""
    seconds = itertools.count(1000)
    book = GroupBook(clock=lambda: float(next(seconds)))
    with Ledger(path) as ledger:
        for group in range(8):
            book.draw(group, group, 0, group)
            lease = book.issue(group, f"rollout-{group % 2}", 0)
            if group < 6:
                book.advance(lease, State.SAMPLED, oldest=0, tokens=10, location=f"rollout-{group % 2}")
                book.advance(lease, State.READY, oldest=0, tokens=10, location="advantages")
        for batch in range(2):
            book.commit(batch, [2 * batch, 2 * batch + 1])
            book.started(batch)
            book.trained(batch)
        book.drop(4, "zero_std", batch=2)
        book.lost(7, "rollout-1 died")
        book.save(ledger)


def test_a_look_finds_stages_oldest_and_rates(tmp_path: Path) -> None:
    written(tmp_path / "ledger.sqlite")
    connection = read(tmp_path / "ledger.sqlite")
    view = look(connection)
    groups = {stage.state: (stage.groups, dict(stage.where)) for stage in view.stages if stage.groups}
    assert groups == {
        State.PENDING: (1, {"": 1}), State.ISSUED: (1, {"rollout-0": 1}), State.READY: (1, {"advantages": 1}),
    }  # fmt: skip
    assert [(one.group, one.state, one.holder) for one in view.oldest] == [
        (5, "ready", "rollout-1"), (6, "issued", "rollout-0"), (7, "pending", None),
    ]  # fmt: skip
    assert view.oldest[0].drawn_at < view.oldest[0].entered_at <= view.newest_entry
    assert (view.trained, view.committed, view.staleness) == (2, 2, 1)
    assert view.conservation.holds and view.conservation.dropped == {"zero_std": 1}
    assert view.events == {"lost": 1}
    # From the end of the first batch to that of the second: two groups of ten tokens.
    assert view.batch_seconds and view.trained_groups_per_s == pytest.approx(2 / view.batch_seconds)
    assert view.trained_tokens_per_s == pytest.approx(20 / view.batch_seconds)
    later = look(connection, now=view.newest_entry + 3600)
    assert later.sampled_groups_per_s == 0 and later.trained_groups_per_s == view.trained_groups_per_s


def test_after_a_resume_batches_are_of_the_run_and_rates_of_its_present_life(tmp_path: Path) -> None:
    written(tmp_path / "copy.sqlite")
    with contextlib.closing(sqlite3.connect(tmp_path / "copy.sqlite", isolation_level=None)) as before:
        before.execute("UPDATE batches SET oldest = -6 WHERE batch = 1")  # of staleness 7, and not inherited
        before.execute("UPDATE batches SET oldest = -5 WHERE batch = 0")
    revived = resume(tmp_path / "copy.sqlite", 1)
    reopen(tmp_path / "copy.sqlite", tmp_path / "ledger.sqlite", cut=1, lineage=3)
    seconds = itertools.count(5000)
    book = GroupBook(3, clock=lambda: float(next(seconds)))
    book.revive(revived)
    with Ledger.reopened(tmp_path / "ledger.sqlite", run_id="", lineage=3, first_batch=1) as ledger:
        for group in (2, 3, 4, 5):
            lease = book.issue(group, "rollout-0", 1)
            book.advance(lease, State.SAMPLED, oldest=1, tokens=30, location="rollout-0")
            book.advance(lease, State.READY, oldest=1, tokens=30, location="advantages")
        for batch in (1, 2):
            book.commit(batch, [2 * batch, 2 * batch + 1])
            book.started(batch)
            book.trained(batch)
        book.save(ledger)
    view = look(read(tmp_path / "ledger.sqlite"))
    assert (view.lineage, view.first_batch, view.trained, view.committed, view.staleness) == (3, 1, 3, 3, 5)
    assert view.conservation.trained == 4 and view.conservation.holds
    assert view.batch_seconds and view.batch_seconds < 100, "not from the life before to this one"
    assert view.trained_tokens_per_s == pytest.approx(60 / view.batch_seconds)


def test_a_ledger_without_a_group_is_no_error(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite"):
        view = look(read(tmp_path / "ledger.sqlite"))
    assert view.conservation.issued == view.trained == 0 and view.oldest == () and view.trained_groups_per_s is None


def test_a_file_that_is_no_ledger_is_named(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_text("no database at all\n" * 100)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite cannot be read: file is not a database"):
        read(tmp_path / "ledger.sqlite")


def test_a_ledger_that_is_just_being_made_is_none_yet(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    with pytest.raises(NoLedger, match="does not exist"):
        read(file)
    file.touch()
    with pytest.raises(NoLedger, match="has no tables of a ledger"):
        read(file)
    connection = sqlite3.connect(file)
    connection.executescript(SCHEMA)
    connection.close()
    with pytest.raises(NoLedger, match="has no lineage"):
        look(read(file))
