"""The commands in bin/ work from any directory and with any Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(__file__).resolve().parents[2] / "bin"
VENV = BIN.parent / ".venv" / "bin" / "python"


@pytest.mark.parametrize("name", ["relax-launch", "relax-logs", "relax-simulate", "relax-status"])
def test_commands_answer_from_anywhere(tmp_path: Path, name: str) -> None:
    done = subprocess.run([BIN / name, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {name}"), done.stderr


@pytest.mark.skipif(not VENV.exists(), reason="the environment was not made by `make env`")
def test_another_python_enters_the_environment_of_the_checkout(tmp_path: Path) -> None:
    other = Path(getattr(sys, "_base_executable", sys.executable))
    code = f"import sys; sys.path.insert(0, {str(BIN)!r}); import _venv; _venv.run('site')"
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([other, script], capture_output=True, text=True, timeout=60, check=True, env=environment)
    assert str(VENV.parents[1] / "lib") in done.stdout


def launch(*words: object) -> subprocess.CompletedProcess[str]:
    command = [BIN / "relax-launch", *map(str, words)]
    return subprocess.run(command, cwd=BIN.parent, capture_output=True, text=True, timeout=60, check=False)


def test_local_topology_passes_a_dry_run_and_both_topologies_hold(tmp_path: Path) -> None:
    assert launch("--keygen", tmp_path / "keys").returncode == 0
    for name, flags in (("local", []), ("two-nodes", ["--keys", tmp_path / "keys"])):
        done = launch(f"topologies/{name}.yaml", "--dry-run", *flags)
        assert done.returncode == 0 and "Nothing was started." in done.stdout, done.stderr
    done = launch("topologies/two-nodes.yaml", "--dry-run")
    assert done.returncode == 2 and "in plain text and by anyone" in done.stderr


def test_keygen_makes_one_key_and_never_replaces_it(tmp_path: Path) -> None:
    keys = tmp_path / "new" / "keys"
    done = launch("--keygen", keys)
    assert done.returncode == 0 and f"key written to {keys}/relax.key" in done.stdout, done.stderr
    secret = (keys / "relax.key").read_text()
    assert secret.splitlines()[-1] not in done.stdout
    again = launch("--keygen", keys)
    assert again.returncode == 2 and "is there already" in again.stderr
    assert (keys / "relax.key").read_text() == secret
