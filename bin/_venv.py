"""Runs a command of this checkout in the environment of this checkout, whatever Python it was started with."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def enter() -> None:
    """Starts over in .venv when there is one and this is another Python; otherwise makes `relax` importable, here and
    in child processes."""
    venv = ROOT / ".venv"
    python = venv / "bin" / "python"
    if python.exists() and Path(sys.prefix).resolve() != venv.resolve():
        os.execv(python, [str(python), *sys.argv])
    sys.path[0] = str(ROOT)
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ROOT) not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, known)])
