"""relax-launch on hosts of their own (see namespaces.py), and the key that such hosts share."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import zmq
from namespaces import Host

from relax.config.keys import write_secret

PATIENCE = 200.0


class Launched:
    """relax-launch --node on one host; what it prints goes to a file."""

    def __init__(self, host: Host, file: Path, folder: Path, name: str, *flags: object) -> None:
        self.directory, self.output = folder / name, folder / f"{name}.output"
        launcher = [sys.executable, tiny_run.ROOT / "bin" / "relax-launch", file, "--node", host.name]
        with self.output.open("w") as output:
            self.process = host.start(
                [*launcher, "--run-dir", self.directory, *flags], stdout=output, stderr=subprocess.STDOUT, cwd=folder
            )

    def end(self) -> tuple[int, str]:
        try:
            return self.process.wait(PATIENCE), self.output.read_text()
        except subprocess.TimeoutExpired:
            self.process.terminate()
            pytest.fail(f"{self.directory.name} did not end: {self.output.read_text()}")

    def events(self, service: str, event: str) -> list[dict[str, Any]]:
        log = self.directory / "logs" / f"{service}.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        return [record for record in map(json.loads, lines) if record["event"] == event]


def secret(folder: Path) -> Path:
    write_secret(folder, zmq.curve_keypair()[1].decode())
    return folder
