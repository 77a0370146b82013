"""Real runs of the whole pipeline on a tiny model, as a user starts them."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from relax.metrics.history import read_rows

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "topologies" / "tiny"
# Bounds a run that hangs; a run takes well under a minute on two idle cores.
PATIENCE = 280.0

OPTIONS: dict[str, Any] = {
    "hf_checkpoint": str(TINY),
    "prompt_data": "reasoning_gym:spell_backward",
    "rm_type": "reasoning_gym",
    "num_rollout": 6,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 8,
    "rollout_max_prompt_len": 256,
    "rollout_max_response_len": 12,
    "lr": 2e-3,
    "max_staleness": 0,
    "seed": 7,
    "peer_timeout": 60,
}

# A run without a model: nothing there that only a model could act on.
SIMULATED: dict[str, Any] = {"rm_type": None, "custom_rm_path": "relax.simulation.reward:coin", "lr": None}


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    directory: Path
    code: int
    output: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Those that count, one a batch."""
        return read_rows(self.directory / "metrics.jsonl")

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]

    def events(self, service: str, event: str) -> list[dict[str, Any]]:
        lines = (self.directory / "logs" / f"{service}.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["event"] == event]


def write_topology(
    folder: Path, *, services: dict[str, Any] | None = None, top: dict[str, Any] | None = None, **options
):
    """A topology file in `folder` for a tiny run; `options` change those of OPTIONS, None takes one out."""
    all_services = {role: {} for role in ("controller", "rollout", "reward", "advantages", "actor")} | (services or {})
    wanted = {name: value for name, value in (OPTIONS | options).items() if value is not None}
    document = {"services": all_services, "options": wanted, **(top or {})}
    path = folder / "topology.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def launch(folder: Path, *flags: str, services: dict[str, Any] | None = None, **options: Any) -> Run:
    """bin/relax-launch from start to end."""
    topology, directory = write_topology(folder, services=services, **options), folder / "run"
    command = [sys.executable, ROOT / "bin" / "relax-launch", topology, "--run-dir", directory, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=folder)
    return Run(directory, done.returncode, done.stdout + done.stderr)
