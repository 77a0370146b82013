"""Real runs of the pipeline on the demo's task (spell a word backward), for the benchmarks of learning."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from relax.metrics.history import read_rows

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "demo"

sys.path.insert(0, str(DEMO))


def run(topology: Path, seed: int, directory: Path, **options: Any) -> list[dict[str, Any]]:
    """The metrics row of every batch of one run in `directory`, with the weak model and the words of `seed`.

    `options` are those of relax-launch. Raises CalledProcessError, its output shown, when the run fails.
    """
    from prepare import prepare

    assets = prepare(seed)
    options |= {"run_dir": directory, "seed": seed, "hf_checkpoint": assets.model, "prompt_data": assets.train}
    if "ref_load" in topology.read_text():
        options["ref_load"] = assets.model
    command = [sys.executable, str(ROOT / "bin" / "relax-launch"), str(topology), *map(_flag, options.items())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()
    return read_rows(directory / "metrics.jsonl")


def _flag(option: tuple[str, Any]) -> str:
    name, value = option[0].replace("_", "-"), option[1]
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"
