"""Services started one by one, in any order, each in a shell of its own."""

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny_run

ROLES = ("actor", "advantages", "rollout", "reward", "controller")


def start(role: str, folder: Path, topology: Path, flags: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, tiny_run.ROOT / "bin" / "relax-service", role, "--topology", topology, *flags]
    with (folder / f"{role}.txt").open("w") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, cwd=folder)


@pytest.mark.parametrize("transport", ["ipc", pytest.param("tcp", marks=pytest.mark.long)])
def test_services_started_one_by_one_are_a_run(tmp_path: Path, transport: str) -> None:
    """The controller comes last; each is given the topology and where the run, or its controller, is."""
    flags: list[str]
    if transport == "ipc":
        topology, flags = tiny_run.write_topology(tmp_path), ["--run-dir", str(tmp_path / "run")]
    else:
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        top = {"controller": endpoint, "run": {"directory": str(tmp_path / "runs"), "name": "alone"}}
        topology, flags = tiny_run.write_topology(tmp_path, top=top), ["--controller", endpoint]
    services = [start(role, tmp_path, topology, flags) for role in ROLES]
    try:
        end = time.monotonic() + tiny_run.PATIENCE
        codes = [service.wait(max(0.0, end - time.monotonic())) for service in services]
    finally:
        for service in services:
            service.kill()
    assert codes == [0] * 5, "\n".join((tmp_path / f"{role}.txt").read_text() for role in ROLES)
    directory = tmp_path / "run" if transport == "ipc" else tmp_path / "runs" / "alone-1"
    assert len(tiny_run.Run(directory, 0, "").rows) == 6
    assert (directory / "export" / "config.json").is_file()
    assert (directory / "logs" / "rollout-0.jsonl").is_file()


def free_port() -> int:
    """A port that nobody listens on now. Only a test may guess so: the endpoint must be in the file beforehand."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
