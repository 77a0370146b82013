"""Small simulated runs, started as a user does, to be looked at."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from relax.config.violation import ConfigError
from relax.status.look import Looker, Status

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0
FLAGS = ("--rollout-batch-size", "8", "--sim-train-seconds", "0.05", "--sim-length", "constant:20")
ENDLESS = ("--num-rollout", "100000")


class Run:
    """A launcher and its run directory."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.directory, self._output = folder / "run", folder / "output"
        command = [sys.executable, ROOT / "bin" / "relax-launch", ROOT / "topologies" / "simulated.yaml"]
        command += ["--run-dir", self.directory, *FLAGS, *flags]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)

    def ends(self) -> int:
        return self.process.wait(PATIENCE)

    def looker(self) -> Looker:
        """Once there is something to look at."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return Looker(self.directory)
            except ConfigError:
                assert time.monotonic() < end, self._output.read_text()
                time.sleep(0.02)

    def look_until(self, looker: Looker, seen: Callable[[Status], bool]) -> list[Status]:
        """Every look up to the first that is as wanted."""
        looks, end = [looker.look()], time.monotonic() + PATIENCE
        while not seen(looks[-1]):
            assert time.monotonic() < end, (looks[-1], self._output.read_text())
            time.sleep(0.05)
            looks.append(looker.look())
        return looks


def status(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "bin" / "relax-status", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
