"""A new run that is loaded from a checkpoint of another: its models, at the beginning of a run of its own."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from relax.launch.rundir import RunDir
from relax.weights.manifest import Manifest
from relax.weights.publication import manifest_path

BATCHES = 4
# Every model that a checkpoint may hold, and a rate that has fallen by the end of the first run.
OPTIONS: dict[str, Any] = {
    "advantage_estimator": "ppo",
    "services": {"critic": {}, "reference": {}},
    "ref_load": str(tiny_run.TINY),
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "ref_update_interval": 2,
    "lr_decay_style": "linear",
}


def digest(run: tiny_run.Run, version: int) -> str:
    return Manifest.load(manifest_path(run.directory / "weights", 0, version)).tag.digest


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def launch(folder: Path, *flags: str, **options: Any) -> tiny_run.Run:
    folder.mkdir()
    run = tiny_run.launch(folder, *flags, **OPTIONS | options)
    assert run.code == 0, run.output
    return run


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_new_run_begins_with_the_models_of_a_checkpoint(tmp_path: Path) -> None:
    first = launch(tmp_path / "first", num_rollout=BATCHES)
    checkpoint, before = first.directory / "checkpoints" / str(BATCHES), contents(first.directory)
    second = launch(tmp_path / "second", "--load", str(first.directory), num_rollout=2, seed=8)
    assert f"load: {checkpoint} of " in second.output
    assert "weights, optimizer, random generators of actor, critic, reference; steps, schedule" in second.output

    # A run of its own, from the beginning, and the other one is as it was.
    run = RunDir.load(second.directory)
    assert run.run_id != RunDir.load(first.directory).run_id and (run.lineage, run.cut) == (0, 0)
    assert contents(first.directory) == before
    with closing(sqlite3.connect(run.ledger)) as ledger:
        assert ledger.execute("SELECT lineage, parent, first_batch FROM lineages").fetchall() == [(0, None, 0)]
        assert ledger.execute("SELECT min(group_id), min(epoch), min(position) FROM groups").fetchone() == (0, 0, 0)
    assert second.column("batch") == [0, 1] and second.column("train/step") == second.column("train/value_step") == [
        1,
        2,
    ]
    assert (checkpoint.parent.parent / "runtime.json").is_file() and (run.checkpoints_dir / "2").is_dir()

    # With the weights of the checkpoint, and the schedule of its own options.
    assert digest(second, 0) == digest(first, BATCHES) != digest(first, 0)
    assert second.column("train/lr")[0] == first.column("train/lr")[0] > first.column("train/lr")[-1]
    for role in ("actor", "critic", "reference"):
        (loaded,) = second.events(role, "checkpoint_loaded")
        assert loaded["path"] == str(checkpoint / role) and loaded["steps"] == 0 and loaded["rng"]
        assert loaded["optimizer"] == (role != "reference")
    assert second.column("train/kl_loss")[0] > first.column("train/kl_loss")[0] == 0, "the reference is an older policy"

    # Without its moments the same first gradient makes another step.
    third = launch(tmp_path / "third", "--load", str(checkpoint), "--no-load-optim", num_rollout=1, seed=8)
    assert digest(third, 0) == digest(second, 0) and digest(third, 1) != digest(second, 1)
    assert third.column("train/grad_norm")[0] == second.column("train/grad_norm")[0]
    assert third.column("train/value_grad_norm")[0] == second.column("train/value_grad_norm")[0]
    assert [event["optimizer"] for event in third.events("actor", "checkpoint_loaded")] == [False]
