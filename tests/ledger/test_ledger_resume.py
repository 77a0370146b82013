"""What a resume takes up again, from a copy of the ledger at a cut."""

import contextlib
import sqlite3
from pathlib import Path

import pytest

from relax.ledger import GroupBook, Ledger, LedgerError, StaleReason, State
from relax.ledger.queries import read, trained_prompts, whereabouts
from relax.ledger.resume import reopen, resume
from relax.ledger.revived import Revived


class Life:
    """A run of one group a batch, over a dataset of `size` prompts."""

    def __init__(self, path: Path, size: int = 10) -> None:
        self.path, self.size = path, size
        self.ledger, self.book, self.next = Ledger(path, run_id="r"), GroupBook(), 0

    def draw(self) -> int:
        group, self.next = self.next, self.next + 1
        self.book.draw(group, group % self.size + 100, group // self.size, group % self.size)
        return group

    def ready(self, group: int) -> int:
        lease = self.book.issue(group, "rollout-0", 0)
        self.book.advance(lease, State.READY, oldest=0, tokens=1)
        return group

    def train(self, batch: int, *groups: int) -> None:
        self.book.commit(batch, [self.ready(group) for group in groups])
        self.book.started(batch)
        self.book.trained(batch)

    def copy(self, name: str = "copy.sqlite") -> Path:
        assert self.book.save(self.ledger)
        to = self.path.with_name(name)
        self.ledger.backup(to, 30)
        return to

    def killed_and_resumed(self, copy: Path, cut: int, lineage: int) -> Revived:
        """The life goes on from `copy`, with what it did since forgotten."""
        self.book.save(self.ledger)
        self.ledger.close()
        revived = resume(copy, cut)
        reopen(copy, self.path, cut=cut, lineage=lineage)
        self.ledger = Ledger.reopened(self.path, run_id="r", lineage=lineage, first_batch=cut)
        self.book = GroupBook(lineage)
        self.book.revive(revived)
        self.next = revived.last_group + 1
        return revived


def drawn(revived: Revived) -> list[tuple[int, int]]:
    return [(group.group, group.attempt) for group in revived.groups]


def test_open_groups_and_those_that_ended_after_the_cut_are_revived_in_group_order(tmp_path: Path) -> None:
    life = Life(tmp_path / "ledger.sqlite")
    book = life.book
    for _ in range(12):
        life.draw()
    life.train(0, 0)
    book.drop(life.ready(1), "filtered", 0)  # before the cut: for good
    book.drop(life.ready(2), "set_aside", 0)
    book.drop(life.ready(3), "straggler", 0, again=True)
    life.train(1, 4)
    life.train(2, 5)  # the cut is at 2: all from here on never was
    book.drop(life.ready(6), "filtered", 2)
    book.drop(life.ready(7), "set_aside", 3)
    book.drop(life.ready(8), "straggler", 2, again=True)
    life.train(3, 8)
    book.drop(life.ready(9), "surplus", 2)
    book.commit(4, [life.ready(10)])
    revived = resume(life.copy(), 2)
    assert drawn(revived) == [(3, 1), (5, 0), (6, 0), (7, 0), (8, 1), (10, 0), (11, 0)]
    assert (revived.parent, revived.cut, revived.last_group) == (0, 2, 11)
    assert (revived.epoch, revived.index) == (1, 2)
    assert {(g.prompt_id, g.epoch, g.position) for g in revived.groups if g.group in (3, 10)} == {
        (103, 0, 3),
        (100, 1, 0),
    }
    life.ledger.close()


def test_a_run_that_drew_nothing_begins_at_the_beginning(tmp_path: Path) -> None:
    life = Life(tmp_path / "ledger.sqlite")
    assert resume(life.copy(), 0) == Revived(0, 0, (), -1, 0, 0)
    life.ledger.close()


def test_the_stream_goes_on_behind_the_last_prompt_drawn_wherever_its_group_is(tmp_path: Path) -> None:
    """The prompt of a surplus group comes back under the highest id, from further back."""
    life = Life(tmp_path / "ledger.sqlite")
    for _ in range(4):
        life.draw()
    life.book.drop(life.ready(1), "surplus", 0)
    life.book.draw(4, 101, 0, 1)
    revived = resume(life.copy(), 0)
    assert (revived.last_group, revived.epoch, revived.index) == (4, 0, 4)
    assert drawn(revived) == [(0, 0), (2, 0), (3, 0), (4, 0)]
    life.ledger.close()


def test_a_copy_that_is_older_than_the_cut_is_refused(tmp_path: Path) -> None:
    life = Life(tmp_path / "ledger.sqlite")
    life.train(0, life.draw())
    life.book.commit(1, [life.ready(life.draw())])
    copy = life.copy()
    assert drawn(resume(copy, 1)) == [(1, 0)]
    with pytest.raises(LedgerError, match=r"knows of 1 trained batches from 0 on, a cut at 2 needs 2"):
        resume(copy, 2)
    life.ledger.close()


def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="does not exist"):
        resume(tmp_path / "nothing", 0)
    (tmp_path / "noise").write_bytes(b"noise" * 1000)
    with pytest.raises(LedgerError):
        resume(tmp_path / "noise", 0)


def test_a_new_lineage_makes_old_leases_stale_and_new_groups_follow_the_last(tmp_path: Path) -> None:
    life = Life(tmp_path / "ledger.sqlite")
    old = life.book.issue(life.draw(), "rollout-0", 0)
    life.killed_and_resumed(life.copy(), 0, lineage=1)
    book = life.book
    assert book.in_state(State.PENDING) == [0]
    assert book.issue(0, "rollout-0", 0).fence == old.fence
    outcome = book.advance(old, State.SAMPLED)
    assert getattr(outcome, "reason", None) is StaleReason.LINEAGE
    with pytest.raises(LedgerError, match="ids must rise"):
        book.draw(0, 0, 0)
    assert life.draw() == 1
    life.ledger.close()


def test_the_ledger_of_the_life_that_ended_is_kept_and_the_new_one_goes_on_from_the_copy(tmp_path: Path) -> None:
    life = Life(tmp_path / "ledger.sqlite")
    life.train(0, life.draw())
    copy = life.copy()
    life.train(1, life.draw())
    life.killed_and_resumed(copy, 1, lineage=1)
    life.train(1, life.draw())
    life.book.save(life.ledger)
    life.ledger.close()
    with contextlib.closing(read(tmp_path / "ledger.before-1.sqlite")) as before:
        assert trained_prompts(before) == [(100, 0), (101, 0)]
    with contextlib.closing(read(life.path)) as after:
        assert after.execute("SELECT lineage, parent, first_batch FROM lineages").fetchall() == [
            (0, None, 0),
            (1, 0, 1),
        ]
        assert whereabouts(after).holds
    assert resume(copy, 1).groups == (), "the copy is as it was"


def test_a_write_ahead_log_that_a_crash_left_is_not_taken_for_the_new_ledgers(tmp_path: Path) -> None:
    life = Life(tmp_path / "ledger.sqlite")
    copy = life.copy()
    for _ in range(50):
        life.train(life.next, life.draw())
    life.book.save(life.ledger)
    life.ledger.flush(10)
    for end in ("", "-wal"):  # as kill -9 leaves them
        (tmp_path / f"crashed.sqlite{end}").write_bytes((tmp_path / f"ledger.sqlite{end}").read_bytes())
    life.ledger.close()
    for end in ("", "-wal"):
        (tmp_path / f"crashed.sqlite{end}").rename(tmp_path / f"ledger.sqlite{end}")
    reopen(copy, life.path, cut=0, lineage=1)
    with contextlib.closing(read(life.path)) as after:
        assert trained_prompts(after) == []
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.before-1.sqlite")) as before:
        assert before.execute("SELECT count(*) FROM groups").fetchone() == (50,)


def test_a_resume_of_a_resume_and_one_of_a_resume_that_died_at_once(tmp_path: Path) -> None:
    life = Life(tmp_path / "ledger.sqlite")
    life.train(0, life.draw())
    life.draw()
    first = life.copy("first")
    life.killed_and_resumed(first, 1, lineage=1)
    assert drawn(life.killed_and_resumed(first, 1, lineage=2)) == [(1, 0)], "lineage 1 left no checkpoint"
    life.train(1, 1)
    life.draw()
    second = life.copy("second")
    life.train(2, 2)
    assert drawn(life.killed_and_resumed(second, 2, lineage=3)) == [(2, 0)]
    life.train(2, 2)
    life.book.save(life.ledger)
    life.ledger.close()
    with contextlib.closing(read(life.path)) as ledger:
        assert ledger.execute("SELECT lineage, parent FROM lineages").fetchall() == [(0, None), (2, 0), (3, 2)]
        assert trained_prompts(ledger) == [(100, 0), (101, 0), (102, 0)]
        assert trained_prompts(ledger, lineage=2) == [(100, 0), (101, 0)]
        assert trained_prompts(ledger, lineage=0) == [(100, 0)]
        assert (whereabouts(ledger).drawn, whereabouts(ledger).trained, whereabouts(ledger).holds) == (3, 3, True)


def test_a_group_that_a_resume_forgot_shows(tmp_path: Path) -> None:
    life = Life(tmp_path / "ledger.sqlite")
    life.draw()
    life.draw()
    life.killed_and_resumed(life.copy(), 0, lineage=1)
    assert life.book.save(life.ledger)
    life.ledger.close()
    with contextlib.closing(sqlite3.connect(life.path)) as ledger, ledger:
        ledger.execute("DELETE FROM groups WHERE lineage = 1 AND group_id = 1")
    with contextlib.closing(read(life.path)) as ledger:
        found = whereabouts(ledger)
        assert (found.drawn, found.open, found.holds) == (2, 1, False)


def test_a_lineage_is_opened_once(tmp_path: Path) -> None:
    life = Life(tmp_path / "ledger.sqlite")
    copy = life.copy()
    with pytest.raises(LedgerError, match="knows lineage 0: lineage 0 cannot be opened after it"):
        reopen(copy, life.path, cut=0, lineage=0)
    life.ledger.close()
    reopen(copy, life.path, cut=0, lineage=1)
    with pytest.raises(LedgerError, match="holds run 'r', lineage 1 from batch 0; expected run 'r', lineage 2 from 0"):
        Ledger.reopened(life.path, run_id="r", lineage=2, first_batch=0)
    with pytest.raises(LedgerError, match="does not exist"):
        Ledger.reopened(tmp_path / "nothing", run_id="r", lineage=2, first_batch=0)
