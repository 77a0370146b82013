"""A topology that passes every check, to be broken one value at a time."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "topologies" / "tiny"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A private copy of the tiny model, to be damaged."""
    return Path(shutil.copytree(TINY, tmp_path / "checkpoint"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"{n} + {n} =", "answer": str(n + n)} for n in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def topology(tmp_path: Path, checkpoint: Path, prompts: Path) -> Callable[..., Path]:
    """Writes a topology file: `topology(services={...}, lr=0.1)`; a None removes an option."""

    def write(services: dict[str, Any] | None = None, top: dict[str, Any] | None = None, **options: Any) -> Path:
        usual: dict[str, Any] = {
            "hf_checkpoint": str(checkpoint),
            "prompt_data": str(prompts),
            "label_key": "answer",
            "rm_type": "exact_match",
            "num_rollout": 4,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 2,
            "rollout_max_prompt_len": 64,
            "rollout_max_response_len": 16,
        }
        every = ("controller", "rollout", "reward", "advantages", "actor")
        document = {
            "run": {"name": "t", "directory": str(tmp_path / "runs")},
            "services": {role: {} for role in every} | (services or {}),
            "options": {name: value for name, value in {**usual, **options}.items() if value is not None},
            **(top or {}),
        }
        file = tmp_path / "topology.yaml"
        file.write_text(yaml.safe_dump(document, sort_keys=False))
        return file

    return write
