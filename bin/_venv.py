"""Runs a command of this checkout in the environment of this checkout, whatever Python it was started with."""

import os
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent


def run(module: str) -> NoReturn:
    """Becomes `python -m module` with the same arguments, in .venv when there is one.

    As a module, because worker processes that start by spawning import the main module again, and must be able to.
    """
    python = ROOT / ".venv" / "bin" / "python"
    chosen = str(python) if python.exists() else sys.executable
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ROOT) not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, known)])
    os.execv(chosen, [chosen, "-m", module, *sys.argv[1:]])
