"""Finding the processes of a run by mark, session and descent."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax.launch.sweep import MARK, processes_of, sweep

READY = "import subprocess, sys, signal, time; {}; print(flush=True); time.sleep(600)"


@pytest.fixture
def mark() -> Iterator[str]:
    made = secrets.token_hex(8)
    yield made
    sweep(made, term_seconds=0)


def start(mark: str, code: str = "0", **more: object) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", READY.format(code)],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        **more,  # type: ignore[call-overload]
    )
    process.stdout.read(1)
    return process


def segments() -> set[Path]:
    """Shared memory of multiprocessing."""
    return set(Path("/dev/shm").glob("psm_*"))


def test_a_mark_finds_its_processes_and_no_others(mark: str) -> None:
    process = start(mark)
    assert [found.pid for found in processes_of(mark)] == [process.pid]
    assert processes_of(mark[:-1]) == [] == processes_of(mark + "0")
    assert sweep(mark) == []
    assert process.wait() == -15


def test_children_without_the_mark_are_found_by_session_and_by_descent(mark: str) -> None:
    bare = "subprocess.Popen(['sleep', '600'], env={})"
    process = start(mark, bare, start_new_session=True)
    assert len(processes_of(mark)) == 2
    process.kill()
    process.wait()
    # Its parent is gone and it has no environment: only the session tells.
    assert processes_of(mark) == []
    assert len(processes_of(mark, {process.pid})) == 1
    assert sweep(mark, {process.pid}) == [] == processes_of(mark, {process.pid})


def test_what_ignores_sigterm_is_killed(mark: str) -> None:
    process = start(mark, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    assert sweep(mark, term_seconds=0.2) == []
    assert process.wait() == -9


def test_resource_trackers_outlive_their_users_long_enough_to_clear_up(mark: str) -> None:
    """They ignore SIGTERM and end by themselves once nobody holds their pipe; killed too soon they leak."""
    code = (
        "from multiprocessing import shared_memory as s; m = s.SharedMemory(create=True, size=64); "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    )
    before = segments()
    process = start(mark, code)
    assert any("resource_tracker" in found.command for found in processes_of(mark))
    made = segments() - before
    assert made and sweep(mark, term_seconds=0.2) == []
    process.wait()
    end = time.monotonic() + 10
    while made & segments():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_ended_process_that_nobody_has_waited_for_does_not_count(mark: str) -> None:
    process = start(mark, start_new_session=True)
    process.kill()
    end = time.monotonic() + 10
    while processes_of(mark, {process.pid}):
        assert time.monotonic() < end
        time.sleep(0.05)
    process.wait()
