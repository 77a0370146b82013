"""Runs whose checkpoints lie on a disk that fills up: they go on and say so, and what was saved before is resumed."""

import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from killing import Life, trained_prompts

from relax.checkpoints import CheckpointDirectory

KIB = 1024
SIMULATED: dict[str, Any] = {
    "services": {"rollout": {"engine": "simulated"}, "actor": {"engine": "simulated"}},
    "rm_type": None,
    "custom_rm_path": "relax.simulation.reward:coin",
    "lr": None,
    "max_staleness": 1,
    "n_samples_per_prompt": 1,
    "rollout_max_response_len": 50,
    "sim_length": "constant:20",
    "sim_tokens_per_second": "1000",
    "sim_slots": 8,
    "sim_train_seconds": 0.1,
    "sim_publish_seconds": 0.02,
}


@pytest.fixture
def checkpoints(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The place of a run's checkpoints, on a disk of its own of so many KiB."""
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}k", "tmpfs", place]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield place
    subprocess.run(["umount", place], check=True)


def fill(disk: Path) -> Path:
    """Leaves no byte."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4 * KIB))
        except OSError:
            return ballast


@pytest.mark.parametrize(
    ("checkpoints", "options", "batches", "patience"),
    [
        pytest.param(600, SIMULATED, 15, 120.0, id="simulated"),
        pytest.param(20 * KIB, {}, 6, 600.0, id="megatron", marks=[pytest.mark.long, pytest.mark.timeout(1500)]),
    ],
    indirect=["checkpoints"],
)
def test_a_disk_that_fills_up_costs_checkpoints_and_no_run(
    tmp_path: Path, checkpoints: Path, options: dict[str, Any], batches: int, patience: float
) -> None:
    tiny_run.write_topology(tmp_path, **options | {"num_rollout": batches, "save_interval": 2})
    life = Life(tmp_path)
    assert life.until(lambda: (checkpoints / "2" / "complete.json").is_file(), patience), life.output
    ballast = fill(checkpoints)
    assert life.end(patience) == 0, life.output
    assert f"warning: batch {batches - 1} is trained and in no checkpoint: bin/relax-logs" in life.output
    failed = tiny_run.Run(life.directory, 0, "").events("controller", "checkpoint_not_written")
    assert failed[-1]["batch"] == batches and all(event["level"] == "error" for event in failed)
    assert "are free; make room there" in failed[-1]["error"] or "No space left on device" in failed[-1]["error"]
    kept = CheckpointDirectory(checkpoints).newest()
    assert kept is not None and kept.batch < batches
    assert {path.name for path in checkpoints.iterdir() if path != ballast} <= {str(b) for b in range(2, batches, 2)}

    ballast.unlink()
    life = Life(tmp_path, "--resume", "--num-rollout", str(batches + 1))
    assert life.end(patience) == 0, life.output
    assert f"goes on at batch {kept.batch}, from {kept.path}" in life.output and "in no checkpoint" not in life.output
    newest = CheckpointDirectory(checkpoints).newest()
    assert newest is not None and newest.batch == batches + 1
    ends = [path.name for path in life.directory.glob("export*")]
    assert sorted(ends) == ([] if options else ["export", "export.before-1"]), "of both ends of a run with a model"
    trained = trained_prompts(life.directory)
    assert trained == Counter(dict.fromkeys(trained, 1)) and len(trained) == (batches + 1) * 4
