"""Session numbers of lives that are over: the system gives them to others, whom nobody of this run may end."""

import secrets
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest

from relax.config.budget import RestartBudget
from relax.launch import supervisor
from relax.launch.guard import Guard
from relax.launch.plan import ProcessPlan
from relax.launch.rundir import RunDir
from relax.launch.stopping import StopSignals
from relax.launch.supervisor import Child, Supervisor

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


@pytest.fixture
def others() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's process, in a session of its own."""
    process = subprocess.Popen(SLEEP, start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_a_guard_spares_a_session_that_it_was_told_to_forget(tmp_path: Path, others: subprocess.Popen[bytes]) -> None:
    guard = Guard(secrets.token_hex(8), tmp_path / "sockets", tmp_path / "memory")
    own = subprocess.Popen(SLEEP, start_new_session=True)
    for process in (own, others):
        guard.watch(process.pid)
    guard.forget(others.pid)
    guard.dismiss(30)
    assert own.wait(10) < 0 and others.poll() is None


@pytest.mark.timeout(60)
def test_what_a_dead_life_left_is_ended_with_it_and_its_number_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "ENDING_SECONDS", 0.1)
    run, seen = RunDir.create(tmp_path / "run"), set[int]()
    swept: list[set[int]] = []
    end = supervisor.sweep

    def sweep(mark: str, sessions: Collection[int] = (), term_seconds: float = 0.0) -> object:
        swept.append(set(sessions))
        return end(mark, sessions, term_seconds)

    monkeypatch.setattr(supervisor, "sweep", sweep)

    def lives(name: str, role: str, code: str) -> ProcessPlan:
        return ProcessPlan(name, role, (sys.executable, "-S", "-c", f"import os, sys, time, pathlib; {code}"), {})

    once = f"mark = pathlib.Path({str(tmp_path)!r}) / 'once'; again = mark.exists(); mark.touch(); "
    until = "[time.sleep(0.05) for _ in iter(lambda: done.exists(), True)]"
    done = f"done = pathlib.Path({str(tmp_path)!r}) / 'done'; "
    plans = [
        lives("controller", "controller", f"{done}{until}"),
        lives("reward", "reward", f"{once}{done}{until} if again else sys.exit(3)"),
        lives("rollout", "rollout", "pass"),
    ]

    def tick(children: Sequence[Child]) -> None:
        seen.update(child.process.pid for child in children)
        if children[1].restarts == 1 and watcher._sessions == {children[0].process.pid, children[1].process.pid}:
            (tmp_path / "done").touch()

    watcher = Supervisor(
        run,
        plans,
        signals=StopSignals(),
        mark=secrets.token_hex(8),
        budget=RestartBudget(3, 600),
        restarted={"reward"},
        tick=tick,
    )
    assert watcher.run().code == 0
    (sessions,) = swept
    assert len(seen) == 4 and len(sessions) == 2 and sessions < seen
