"""relax-status of a run that was resumed: its present life, what it inherited, and its last checkpoint."""

import os
import re
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from relax.checkpoints import CheckpointDirectory
from relax.launch.outcome import Ended, record
from relax.launch.rundir import RunDir
from relax.ledger import GroupBook, State
from relax.metrics.rows import BatchRows
from relax.services.control.opening import open_ledger
from relax.services.control.saving import LEDGER, LEDGER_FILE
from relax.status.look import Looker, RunState, Status
from relax.status.show import blocks, plain
from relax.status.snapshot import Seen, Snapshot

ME = Seen("controller", "controller", "", os.getpid(), "a1", True, time.time() + 3600, time.time(), "at work", 1e6)
SNAPSHOT = Snapshot(
    run_id="", lineage=0, host=os.uname().nodename, time=0, moved=0, code=None, batches=10, version=0, published=0,
    next_batch=0, waits="w", missing=(), in_flight=0, ready=0, slots=8, free_slots=8, services=(ME,),
)  # fmt: skip


class Pipeline:
    """What a controller writes of one life, with one group a batch."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.ledger, revived = open_ledger(run)
        self.book = GroupBook(run.lineage)
        self.rows = BatchRows(run.metrics, frozenset({"controller"}), run.lineage, 1, 10.0, first_batch=run.cut)
        if revived is not None:
            self.book.revive(revived)
        self.revived = [] if revived is None else [group.group for group in revived.groups]

    def train(self, *batches: int, set_aside: int = 0) -> None:
        for batch in batches:
            if batch not in self.revived:
                self.book.draw(batch, batch, 0, batch)
            lease = self.book.issue(batch, "rollout-0", batch)
            self.book.advance(lease, State.READY, oldest=batch, tokens=10, location="advantages")
            self.book.commit(batch, [batch])
            self.book.started(batch)
            self.book.trained(batch)
            life = {"rollout/raw_reward": ("last", float(self.run.lineage), 1.0)}
            aside = {"rollout/set_aside": ("sum", float(set_aside), 1.0)} if set_aside else {}
            self.rows.report(batch, "controller", life | aside)
        self.rows.close_due()
        self.book.save(self.ledger)
        self.ledger.flush(10)

    def save(self, cut: int) -> None:
        directory = CheckpointDirectory(self.run.checkpoints_dir)
        writing = directory.begin(cut)
        self.ledger.backup(writing.part(LEDGER) / LEDGER_FILE, 30)
        writing.close_part(LEDGER)
        directory.complete(writing, parts=[LEDGER], run_id=self.run.run_id, lineage=self.run.lineage)

    def says(self) -> None:
        now = time.time()
        told = replace(SNAPSHOT, run_id=self.run.run_id, lineage=self.run.lineage, time=now, moved=now)
        told.write(self.run.status)

    def dies(self) -> None:
        self.ledger.close()
        self.run.leave()


def lines(status: Status) -> str:
    return plain(list(blocks(status)))


def batches(status: Status) -> list[tuple[int, float]]:
    return [(row["batch"], row["rollout/raw_reward"]) for row in status.rows]


def test_each_life_is_seen_as_what_it_is(tmp_path: Path) -> None:
    first = Pipeline(RunDir.create(tmp_path / "run"))
    looker = Looker(tmp_path / "run")
    first.says()
    assert "checkpoint: none" in lines(looker.look())
    first.train(*range(4))
    first.train(4, 5, 6, set_aside=1)
    first.save(4)  # the copy of a later moment than the cut
    seen = looker.look()
    assert seen.state is RunState.RUNNING and seen.set_aside == 3
    assert "batches: 7 of 10 trained" in lines(seen) and "lineage" not in lines(seen)
    assert seen.checkpoint is not None and re.search(r"checkpoint: 4, written \d+s ago, 0\.", lines(seen))
    first.dies()
    record(first.run, None, Ended(datetime.now(UTC), 1, "controller was killed", "first error of the run: x"))
    assert looker.look().state is RunState.FAILED

    run = RunDir.resume(tmp_path / "run", 4)
    for again in (looker, Looker(tmp_path / "run")):
        seen = again.look()  # neither the word of the launcher nor the ledger of the life before speaks of this one
        assert (seen.state, seen.problems, seen.ledger, seen.ended) == (RunState.STARTING, (), None, None)
        assert "starting; lineage 1, resumed at batch 4" in lines(seen)
        assert [batch for batch, _ in batches(seen)] == [0, 1, 2, 3] and seen.set_aside == 0
        assert seen.checkpoint is not None and seen.checkpoint.batch == 4
    second = Pipeline(run)
    second.says()
    assert second.revived == [4, 5, 6]
    seen = looker.look()
    assert seen.ledger is not None and (seen.ledger.trained, seen.ledger.committed) == (4, 4)
    second.train(4, 5)
    seen = looker.look()
    assert batches(seen) == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 0.0), (4, 1.0), (5, 1.0)]
    text = lines(seen)
    assert (
        re.search(r"running for \d+s; lineage 1, resumed at batch 4", text)
        and "batches: 6 of 10 trained, 6 committed" in text
    )
    assert re.search(r"written \d+s ago in lineage 0", text) and "groups of lineage 1: issued 2 = trained 2" in text
    assert seen.to_json()["lineage"] == 1 and seen.to_json()["checkpoint"]["batch"] == 4
    second.save(6)
    assert re.search(r"checkpoint: 6, written \d+s ago in lineage 1", lines(looker.look()))
    second.dies()


def test_a_checkpoint_beyond_the_cut_of_this_life_is_not_what_a_resume_would_take(tmp_path: Path) -> None:
    first = Pipeline(RunDir.create(tmp_path / "run"))
    for cut in (1, 2, 3):
        first.train(cut - 1)
        if cut > 1:
            first.save(cut)
    first.dies()
    run = RunDir.resume(tmp_path / "run", 2)  # as if 3 were damaged
    made = Looker(run.path).look().checkpoint
    assert made is not None and made.batch == 2
    run.leave()


def test_a_life_that_died_before_it_opened_its_ledger_says_so(tmp_path: Path) -> None:
    first = Pipeline(RunDir.create(tmp_path / "run"))
    first.train(0)
    first.dies()
    RunDir.resume(tmp_path / "run", 0).leave()
    seen = Looker(tmp_path / "run").look()
    assert seen.state is RunState.OVER and batches(seen) == []
    assert "is of lineage 0: the controller of lineage 1 ended before it opened its own" in seen.problems[0]
