"""The parts of a look: the controller's file, the errors of the logs, who lives."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from relax.launch.outcome import Ended, last, record
from relax.launch.rundir import RunDir
from relax.status.errors import ErrorLogs
from relax.status.look import Looker, RunState
from relax.status.show import blocks, plain
from relax.status.snapshot import Seen, Snapshot, SnapshotError

ME = Seen("controller", "controller", "", os.getpid(), "a1", True, time.time(), time.time(), "at work", 1e6)
SNAPSHOT = Snapshot(
    run_id="r", lineage=0, host="elsewhere", time=1.0, moved=1.0, code=None, batches=None, version=0, published=None,
    next_batch=0, waits="w", missing=("actor",), in_flight=0, ready=0, slots=8, free_slots=8, services=(ME,),
)  # fmt: skip


def test_a_snapshot_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    assert Snapshot.read(file) is None
    SNAPSHOT.write(file)
    assert Snapshot.read(file) == SNAPSHOT


def test_a_reader_never_sees_half_a_snapshot(tmp_path: Path) -> None:
    file, written = tmp_path / "status.json", threading.Event()
    large = replace(SNAPSHOT, services=(ME,) * 100)

    def write() -> None:
        for version in range(100):
            replace(large, version=version).write(file)
        written.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = 0
    while not written.is_set() or not seen:
        seen += Snapshot.read(file) is not None
    writer.join()
    assert Snapshot.read(file) == replace(large, version=99)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2}, {"version": "0"}, {"published": 0.5}, {"services": []}, {"services": 3}, {"unknown": 1},
        {"time": None}, {"missing": "actor"}, {"services": [{"name": "controller"}]}, {"code": True},
    ],
)  # fmt: skip
def test_a_file_that_is_no_snapshot_is_refused_by_name(tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "status.json"
    SNAPSHOT.write(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(SnapshotError, match=r"status\.json"):
        Snapshot.read(file)


def run_dir(folder: Path) -> RunDir:
    run = RunDir.create(folder / "run")
    run.leave()
    return run


def state(run: RunDir, snapshot: Snapshot) -> RunState:
    replace(snapshot, run_id=run.run_id).write(run.status)
    return Looker(run.path).look().state


def test_the_state_follows_from_the_controllers_word_and_its_process(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    assert Looker(run.path).look().state is RunState.OVER
    now, here = time.time(), replace(SNAPSHOT, host=os.uname().nodename)
    assert state(run, replace(here, time=now)) is RunState.RUNNING
    assert state(run, replace(here, time=now - 60)) is RunState.SILENT
    assert state(run, replace(SNAPSHOT, time=now)) is RunState.RUNNING
    assert state(run, replace(SNAPSHOT, time=now - 60)) is RunState.SILENT, "another host: its process is not seen"
    for code, expected in ((0, RunState.FINISHED), (1, RunState.FAILED), (143, RunState.STOPPED)):
        assert state(run, replace(here, time=now, code=code)) is expected
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    gone = replace(ME, pid=child.pid)
    assert state(run, replace(here, time=now, services=(gone,))) is RunState.CRASHED
    reused = replace(ME, joined=0.0)
    assert state(run, replace(here, time=now, services=(reused,))) is RunState.CRASHED, "the number is another's now"


def test_a_run_that_somebody_takes_part_in_and_that_has_no_status_is_starting(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    try:
        for make in (lambda: None, run.ledger.touch):  # the controller is about to make its ledger, or is at it
            make()
            status = Looker(run.path).look()
            assert status.state is RunState.STARTING and status.problems == ()
    finally:
        run.leave()
    (problem,) = Looker(run.path).look().problems
    assert "has no tables of a ledger" in problem


def test_the_launchers_word_holds_until_the_run_goes_on_again(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    assert last(run) is None
    record(run, None, Ended(datetime.now(UTC), 1, "actor was killed", "first error of the run: x"))
    record(run, "b", Ended(datetime.now(UTC), 0, "the run has ended"))
    ended = last(run)
    assert ended is not None and (ended.code, ended.text) == (1, "actor was killed")
    now = time.time()
    stopped = replace(SNAPSHOT, host=os.uname().nodename, time=now - 60, code=143)
    assert state(run, stopped) is RunState.FAILED, "the launcher knows why it stopped the controller"
    assert "launcher: actor was killed" in plain(list(blocks(Looker(run.path).look())))
    assert state(run, replace(stopped, time=now + 1, code=None)) is RunState.RUNNING


def log(file: Path, *records: tuple[str, str, str]) -> None:
    with file.open("a") as lines:
        for when, level, event in records:
            lines.write(json.dumps({"time": when, "level": level, "service": file.stem, "event": event}) + "\n")


def test_the_first_error_is_marked_and_each_service_has_its_last(tmp_path: Path) -> None:
    errors = ErrorLogs(tmp_path)
    assert errors.read() == []
    log(tmp_path / "a.jsonl", ("3", "error", "second of a"), ("1", "info", "an error"), ("4", "critical", "third of a"))
    log(tmp_path / "b.jsonl", ("2", "error", "first of all"), ("2.5", "error", "last of b"))
    with (tmp_path / "a.jsonl").open("a") as torn:
        torn.write('{"time": "0", "level": "error", "ev')
    seen = [(error.service, error.text, error.count, error.first) for error in errors.read()]
    assert seen == [("b", "first of all", 2, True), ("b", "last of b", 2, False), ("a", "third of a", 2, False)]
    log(tmp_path / "c.jsonl", ("5", "error", "only of c"))
    assert [error.text for error in errors.read()] == ["first of all", "last of b", "third of a", "only of c"]


def test_tables_keep_their_columns_and_long_lists_are_cut(tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    services = (ME, *(replace(ME, name=f"rollout-{i}", role="rollout", lives=i + 1, gone=i == 1) for i in range(2)))
    replace(SNAPSHOT, run_id=run.run_id, time=time.time(), services=services).write(run.status)
    lines = plain(list(blocks(Looker(run.path).look()))).splitlines()
    (head,) = [line for line in lines if line.startswith("service ")]
    rows = [line for line in lines if line.startswith(("controller ", "rollout-"))]
    assert [row[head.index("alive") :].split()[0] for row in rows] == ["?", "?", "left"]
    assert [row.split()[5] for row in rows] == ["0", "0", "1"], "restarts"
    assert "not joined yet: actor" in lines
