"""Runs that are killed as a whole, at a moment that a test chooses, and go on."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import tiny_run

from relax.launch.plan import mark_of
from relax.launch.rundir import RunDir
from relax.launch.sweep import processes_of
from relax.ledger import queries

START = 120.0
POLL_SECONDS = 0.002


class Life:
    """One launch of a run, in `folder`, whose topology file is there."""

    def __init__(self, folder: Path, *flags: str, environment: dict[str, str] | None = None) -> None:
        self.folder, self.directory = folder, folder / "run"
        command = [sys.executable, tiny_run.ROOT / "bin" / "relax-launch", folder / "topology.yaml"]
        command += ["--run-dir", self.directory, *flags]
        self._output = (folder / "output").open("w+b")
        self.process = subprocess.Popen(
            command, stdout=self._output, stderr=subprocess.STDOUT, cwd=folder, env=environment
        )

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def lineage(self) -> int:
        return RunDir.load(self.directory).lineage

    def lineage_is(self, lineage: int) -> bool:
        """Waits for the run to be opened; False when it ended before."""
        return self.until(lambda: (self.directory / "runtime.json").is_file() and self.lineage() == lineage)

    def trained(self) -> int:
        """Batches of which the controller has written a row, in this life or one before."""
        file = self.directory / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.is_file() else 0

    def until(self, moment: Callable[[], object], patience: float = START, poll: float = POLL_SECONDS) -> bool:
        """True at the moment, False when the run ended before."""
        end = time.monotonic() + patience
        while not moment():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < end, f"waited {patience} s in vain\n{self.output}"
            time.sleep(poll)
        return True

    def kill(self) -> None:
        """kill -9 of the launcher, its guard and every service, until none is left."""
        mark = mark_of(RunDir.load(self.directory), None)
        victims = [self.process.pid, *(process.pid for process in processes_of(mark))]
        while victims:
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            victims = [process.pid for process in processes_of(mark)]
        self._output.close()

    def pid(self, name: str) -> int | None:
        """Of a service; None while it is not there."""
        mark, words = mark_of(RunDir.load(self.directory), None), f"--name {name} "
        return next((process.pid for process in processes_of(mark) if words in process.command), None)

    def kill_service(self, name: str) -> None:
        """kill -9 of one service."""
        pid = self.pid(name)
        assert pid is not None, f"no {name} in {self.directory}"
        os.kill(pid, signal.SIGKILL)

    def end(self, patience: float = START) -> int:
        try:
            return self.process.wait(patience)
        finally:
            if self.process.poll() is None:
                self.kill()
            self._output.close()


def trained_prompts(directory: Path) -> Counter[tuple[int, int]]:
    """(prompt, epoch) of what the newest lineage trained and inherited."""
    with closing(queries.read(directory / "ledger.sqlite")) as ledger:
        return Counter(queries.trained_prompts(ledger))
