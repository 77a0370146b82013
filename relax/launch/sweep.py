"""Finding and ending every process of a run on this host, whoever started it and whatever became of its parents.

A process belongs to a run when its environment holds the run's mark, when it is in the session of a service that the
launcher started (a process that renames itself may overwrite its environment), or when its parent belongs to it.
"""

import os
import signal
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

MARK = "RELAX_RUN_ID"
TERM_SECONDS = 3.0
KILL_SECONDS = 1.0
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    session: int
    command: str


def kill_session(session: int) -> None:
    """Kills what a dead leader has left in its session, and what that has started, and returns when it is gone."""
    _end("", {session}, signal.SIGKILL, KILL_SECONDS)


def processes_of(mark: str, sessions: Collection[int] = ()) -> list[Process]:
    """Live processes of the run whose RELAX_RUN_ID is `mark` (empty: of the sessions alone), this one never among
    them."""
    everyone = {process.pid: process for process in _all()}
    entry = f"{MARK}={mark}".encode()
    found = {
        pid
        for pid, process in everyone.items()
        if process.session in sessions or (mark and entry in _read(pid, "environ").split(b"\0"))
    }
    while more := {pid for pid, process in everyone.items() if process.parent in found} - found:
        found |= more
    return [everyone[pid] for pid in sorted(found - {os.getpid()})]


def sweep(mark: str, sessions: Collection[int] = (), term_seconds: float = TERM_SECONDS) -> list[Process]:
    """Ends the run's processes: SIGTERM, a bounded wait, SIGKILL. Returns those that even SIGKILL left behind.

    multiprocessing's resource trackers are killed last: once their users are gone they remove the shared memory that
    those leave, and end.
    """
    left = _end(mark, sessions, signal.SIGTERM, term_seconds)
    if left:
        _end(mark, sessions, signal.SIGKILL, KILL_SECONDS, spare_trackers=True)
        left = _end(mark, sessions, signal.SIGKILL, KILL_SECONDS)
    return left


def _end(
    mark: str, sessions: Collection[int], kind: signal.Signals, seconds: float, spare_trackers: bool = False
) -> list[Process]:
    end = time.monotonic() + seconds
    told: set[int] = set()
    while True:
        left = processes_of(mark, sessions)
        for process in left:
            if process.pid not in told and not (spare_trackers and "resource_tracker" in process.command):
                told.add(process.pid)
                _signal(process.pid, kind)
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.05)


def _signal(pid: int, kind: signal.Signals) -> None:
    try:
        os.kill(pid, kind)
    except (ProcessLookupError, PermissionError):
        return


def _all() -> Iterator[Process]:
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        pid = int(folder.name)
        # "pid (command) state parent group session ...", and the command may hold anything.
        fields = _read(pid, "stat").rpartition(b")")[2].split()
        if len(fields) > 3 and fields[0] not in (b"Z", b"X"):
            command = _read(pid, "cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()
            yield Process(pid, int(fields[1]), int(fields[3]), command)


def _read(pid: int, name: str) -> bytes:
    """A file of /proc/<pid>; empty when the process is gone or another user's."""
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""
