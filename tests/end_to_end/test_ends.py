"""How a real run ends when somebody dies: named, bounded, and with nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import tiny_run

from relax.launch.rundir import RunDir
from relax.launch.sweep import processes_of

# What the contract promises; the wait ends as soon as everything is gone.
GONE_SECONDS = 10.0


class Going:
    """A run that goes on until somebody ends it."""

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "run"
        topology = tiny_run.write_topology(folder, num_rollout=100_000)
        command = [sys.executable, tiny_run.ROOT / "bin" / "relax-launch", topology, "--run-dir", self.directory]
        self.launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wait_for(self._trains, tiny_run.PATIENCE, "the first batch")
        self.run = RunDir.load(self.directory)

    def _trains(self) -> bool:
        metrics = self.directory / "metrics.jsonl"
        assert self.launcher.poll() is None, self.launcher.communicate()[0]
        return metrics.is_file() and metrics.stat().st_size > 0

    def rows(self) -> int:
        """Batches that are trained and reported."""
        return (self.directory / "metrics.jsonl").read_bytes().count(b"\n")

    def process(self, name: str) -> psutil.Process:
        """The process of a service, found by its command line."""
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "relax.services.cli" in words and name in words and str(self.run.topology) in words:
                return process
        raise AssertionError(f"{name} is not running")

    def nothing_left(self) -> bool:
        return not processes_of(self.run.run_id) and not self.run.shm_dir.exists() and not self.run.runtime_dir.exists()

    def end(self) -> str:
        """What the launcher printed, after it has ended by itself."""
        return self.launcher.communicate(timeout=30)[0]


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.1)


@pytest.fixture
def going(tmp_path: Path) -> Iterator[Going]:
    run = Going(tmp_path)
    yield run
    run.launcher.kill()
    for process in processes_of(run.run.run_id):
        os.kill(process.pid, signal.SIGKILL)


def test_killing_the_launcher_leaves_nothing_behind(going: Going) -> None:
    going.launcher.kill()
    going.launcher.wait()
    wait_for(going.nothing_left, GONE_SECONDS, "the processes and the shared memory of the run to be gone")


def test_a_rollout_that_dies_comes_back_and_an_actor_that_dies_ends_the_run_named_last(going: Going) -> None:
    going.process("rollout-0").kill()
    rows = going.rows()
    # One batch may have been sampled before the death; the next ones need the new life.
    wait_for(lambda: going.rows() > rows + 2, tiny_run.PATIENCE, "batches of the rollout's next life")
    going.process("actor").kill()
    last = going.end().strip().splitlines()[-1]
    assert going.launcher.returncode not in (0, None)
    assert "actor" in last
    wait_for(going.nothing_left, GONE_SECONDS, "the processes and the shared memory of the run to be gone")


@pytest.mark.long
def test_ctrl_c_ends_the_run(going: Going) -> None:
    going.launcher.send_signal(signal.SIGINT)
    going.end()
    assert going.launcher.returncode == 130
    wait_for(going.nothing_left, GONE_SECONDS, "the processes and the shared memory of the run to be gone")
