"""One look at a run: its ledger, its metrics, its logs, what its controller wrote last, and which processes live.

Nothing is asked of the run and nothing is written: it works beside a run that goes on as well as years after its end.
What cannot be read is a problem of that part alone, named in the answer.
"""

import socket
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from relax.checkpoints import Checkpoint
from relax.launch.outcome import Ended, last
from relax.launch.places import members
from relax.launch.resume import newest_marked
from relax.launch.rundir import RunDir
from relax.ledger.progress import LedgerView
from relax.ledger.progress import look as look_at_ledger
from relax.ledger.queries import NoLedger, read
from relax.ledger.states import LedgerError
from relax.metrics.history import History, Tail
from relax.status.errors import ErrorLogs, LoggedError
from relax.status.snapshot import Seen, Snapshot, SnapshotError

ROWS = 10
# A controller that has not written for so long is stuck, or its host is gone.
SILENT_SECONDS = 15.0


class RunState(StrEnum):
    STARTING = "starting"  # processes of it live, the controller has not written yet
    RUNNING = "running"
    SILENT = "silent"  # the controller lives (or cannot be seen from here) and has not written for a while
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"  # by a signal
    CRASHED = "crashed"  # the controller is dead, and neither it nor a launcher could say why
    OVER = "over"  # nothing of it lives, and its controller never wrote a status

    @property
    def goes_on(self) -> bool:
        return self in (RunState.STARTING, RunState.RUNNING, RunState.SILENT)

    @property
    def is_well(self) -> bool:
        return self in (RunState.STARTING, RunState.RUNNING, RunState.FINISHED)


@dataclass(frozen=True, slots=True)
class Status:
    """All that a look found; parts are None or empty where there is nothing (yet) or where `problems` say why.

    `ended` is what the launcher said when all was over. `now` is the moment that ages refer to, in Unix seconds: of the
    look while the run goes on, else of the last sign of life. `alive` says of each service whether its process lives;
    None where that cannot be seen from here. `checkpoint` is the newest that a resume would look at, by its marker.
    `rows` are the last rows of metrics that count, oldest first.
    """

    run: RunDir
    state: RunState
    now: float
    ended: Ended | None
    snapshot: Snapshot | None
    alive: Mapping[str, bool | None]
    ledger: LedgerView | None
    checkpoint: Checkpoint | None
    rows: tuple[Mapping[str, Any], ...]
    errors: tuple[LoggedError, ...]
    set_aside: int
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        ledger = None
        if self.ledger is not None:
            ledger = asdict(self.ledger)
            balance = self.ledger.conservation
            ledger["conservation"] = {
                "issued": balance.issued,
                "trained": balance.trained,
                "dropped": dict(balance.dropped),
                "in_flight": {state.word: n for state, n in balance.in_flight.items()},
                "holds": balance.holds,
            }
            ledger["stages"] = [asdict(stage) | {"state": stage.state.word} for stage in self.ledger.stages]
        return {
            "run_dir": str(self.run.path),
            "run_id": self.run.run_id,
            "state": self.state.value,
            "ended": None if self.ended is None else asdict(self.ended) | {"time": self.ended.time.isoformat()},
            "now": self.now,
            "controller": None if self.snapshot is None else asdict(self.snapshot),
            "alive": dict(self.alive),
            "lineage": self.run.lineage,
            "cut": self.run.cut,
            "ledger": ledger,
            "checkpoint": None if self.checkpoint is None else _plain(self.checkpoint),
            "metrics": [dict(row) for row in self.rows],
            "set_aside": self.set_aside,
            "errors": [asdict(error) for error in self.errors],
            "problems": list(self.problems),
        }


class Looker:
    """Looks at one run, once or again and again; a later look reads only what was appended to metrics and logs.

    Raises ConfigError where `path` is no run directory or a damaged one.
    """

    def __init__(self, path: Path) -> None:
        self._run = RunDir.load(path)
        self._tail = Tail(self._run.metrics)
        self._rows = History(ROWS)
        self._set_aside: dict[int, int] = {}  # batch -> prompts set aside, where there were any
        self._errors = ErrorLogs(self._run.logs_dir)

    def look(self) -> Status:
        """Raises ConfigError where the directory is none any more."""
        self._run = RunDir.load(self._run.path)  # it may have been resumed since
        problems: list[str] = []
        snapshot = self._snapshot(problems)
        alive = _alive(snapshot)
        ended = self._ended(snapshot, alive, problems)
        state = self._state(snapshot, alive, ended)
        ledger = self._ledger(state, problems)
        now = time.time()
        if not state.goes_on:
            now = max(snapshot.time if snapshot else 0.0, ledger.newest_entry if ledger else 0.0)
        return Status(
            run=self._run,
            state=state,
            now=now,
            ended=ended,
            snapshot=snapshot,
            alive=alive,
            ledger=ledger,
            checkpoint=newest_marked(self._run),
            rows=self._metrics(problems),
            errors=self._logged(problems),
            set_aside=sum(self._set_aside.values()),
            problems=tuple(problems),
        )

    def _snapshot(self, problems: list[str]) -> Snapshot | None:
        try:
            snapshot = Snapshot.read(self._run.status)
        except SnapshotError as error:
            problems.append(str(error))
            return None
        if snapshot is not None and snapshot.run_id != self._run.run_id:
            problems.append(f"{self._run.status} is of run {snapshot.run_id}, the directory of {self._run.run_id}")
            return None
        # The word of the life before says nothing of this one, whose controller has not written yet.
        return snapshot if snapshot is None or snapshot.lineage == self._run.lineage else None

    def _ended(self, snapshot: Snapshot | None, alive: Mapping[str, bool | None], problems: list[str]) -> Ended | None:
        """The launcher's last word, unless the run goes on again."""
        try:
            ended = last(self._run)
        except OSError as error:
            problems.append(f"{error.filename} cannot be read: {error.strerror}")
            return None
        if ended is None or snapshot is None:
            return ended
        again = snapshot.time > ended.time.timestamp() and alive[snapshot.controller.name] is not False
        return None if again and snapshot.code is None else ended

    def _state(self, snapshot: Snapshot | None, alive: Mapping[str, bool | None], ended: Ended | None) -> RunState:
        code = ended.code if ended is not None else snapshot.code if snapshot is not None else None
        if code is not None:
            return {0: RunState.FINISHED, 1: RunState.FAILED}.get(code, RunState.STOPPED)
        if snapshot is not None and alive[snapshot.controller.name] is not False:
            return RunState.SILENT if time.time() - snapshot.time > SILENT_SECONDS else RunState.RUNNING
        # What takes part in a run without a controller that has written: one that begins, or begins again.
        if members(self._run.runtime_dir):
            return RunState.STARTING
        return RunState.OVER if snapshot is None else RunState.CRASHED

    def _ledger(self, state: RunState, problems: list[str]) -> LedgerView | None:
        try:
            connection = read(self._run.ledger)
            try:
                seen = look_at_ledger(connection, time.time() if state.goes_on else None)
            finally:
                connection.close()
            if seen.lineage >= self._run.lineage:
                return seen
            ended = f"the controller of lineage {self._run.lineage} ended before it opened its own"
            raise NoLedger(f"{self._run.ledger} is of lineage {seen.lineage}: {ended}")
        except NoLedger as error:
            if state is not RunState.STARTING:
                problems.append(str(error))
        except LedgerError as error:
            problems.append(str(error))
        except sqlite3.Error as error:
            problems.append(f"{self._run.ledger} cannot be read: {error}")
        return None

    def _metrics(self, problems: list[str]) -> tuple[Mapping[str, Any], ...]:
        try:
            for row in self._tail.read():
                self._rows.add(row)
                self._forget(row["batch"])
                if aside := int(row.get("rollout/set_aside") or 0):
                    self._set_aside[row["batch"]] = aside
        except OSError as error:
            problems.append(f"{self._run.metrics} cannot be read: {error.strerror}")
        if self._rows and self._rows.newest.get("lineage", self._run.lineage) < self._run.lineage:
            self._forget(self._run.cut)
            self._rows.begin(self._run.cut)
        return tuple(self._rows)

    def _forget(self, cut: int) -> None:
        for batch in [batch for batch in self._set_aside if batch >= cut]:
            del self._set_aside[batch]

    def _logged(self, problems: list[str]) -> tuple[LoggedError, ...]:
        try:
            return tuple(self._errors.read())
        except OSError as error:
            problems.append(f"{self._run.logs_dir} cannot be read: {error.strerror} ({error.filename})")
            return ()


def _plain(made: Checkpoint) -> dict[str, Any]:
    plain = {"path": str(made.path), "batch": made.batch, "lineage": made.lineage, "created_at": made.created_at}
    return plain | {"bytes": made.size, "parts": sorted(made.parts)}


def _alive(snapshot: Snapshot | None) -> dict[str, bool | None]:
    if snapshot is None:
        return {}
    here = snapshot.host == socket.gethostname()
    return {seen.name: _lives(seen) if here and seen.local else None for seen in snapshot.services}


def _lives(seen: Seen) -> bool:
    """A process that began after the service had joined is another one that got its number."""
    try:
        process = psutil.Process(seen.pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= seen.joined + 1.0
    except psutil.NoSuchProcess:
        return False
