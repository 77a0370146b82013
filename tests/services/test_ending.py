"""A service that was told to end ends, wherever it hangs, with the code that was decided before."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from relax.services import service

STUCK = """
import sys, time
from pathlib import Path
from relax.config.options import Options
from relax.launch.rundir import RunDir
from relax.services import service

service.STUCK_SECONDS = 0.5


class Hanging(service.Service):
    role = "controller"

    def bind(self):
        return self.run.endpoint("controller")

    def handlers(self):
        return {}

    async def join(self):
        self.end(int(sys.argv[2]))

    async def release(self):
        time.sleep(600)


run = RunDir.create(Path(sys.argv[1]))
options = Options()
sys.exit(Hanging.start(service.Context("controller", options, run, "", "", None, options)))
"""


@pytest.mark.parametrize("code", [0, 1])
def test_an_end_that_hangs_is_cut_short_and_told(tmp_path: Path, code: int) -> None:
    command = [sys.executable, "-c", STUCK, str(tmp_path / "run"), str(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert "in release" in done.stderr, "the output names where it hung"
    assert not Path(f"/dev/shm/relax-{run_id(tmp_path)}").exists()


def run_id(tmp_path: Path) -> str:
    return json.loads((tmp_path / "run" / "runtime.json").read_text())["run_id"]


STALLED = """
import asyncio, sys, time
from pathlib import Path
from relax.config.options import Options
from relax.launch.rundir import RunDir
from relax.services import service


class Stalling(service.Service):
    role = "reward"

    def handlers(self):
        return {}

    async def join(self):
        with self.watchdog.work("its work"):
            await {"work": self.never_done, "loop": self.never_back}[sys.argv[2]]()

    async def never_done(self):
        await asyncio.sleep(600)

    async def never_back(self):
        time.sleep(600)


run = RunDir.create(Path(sys.argv[1]))
options = Options(stall_timeout=1.0)
sys.exit(Stalling.start(service.Context("reward-0", options, run, "", "", None, options)))
"""


@pytest.mark.parametrize("where", ["work", "loop"])
def test_a_service_that_stalls_ends_with_a_code_of_its_own_and_its_stacks(tmp_path: Path, where: str) -> None:
    command = [sys.executable, "-c", STALLED, str(tmp_path / "run"), where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == service.STALLED, done.stderr
    assert "Current thread" in done.stderr and ("in never_back" in done.stderr) == (where == "loop")
    assert not Path(f"/dev/shm/relax-{run_id(tmp_path)}").exists()
