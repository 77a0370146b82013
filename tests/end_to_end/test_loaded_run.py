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
# A rate that has fallen by the end of the first run, and the models beside the actor that a checkpoint may hold.
FALLING: dict[str, Any] = {"lr_decay_style": "linear"}
CRITIC: dict[str, Any] = {"advantage_estimator": "ppo", "services": {"critic": {}}, **FALLING}
REFRESHED: dict[str, Any] = {
    "services": {"reference": {}},
    "ref_load": str(tiny_run.TINY),
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "ref_update_interval": 2,
    **FALLING,
}


def digest(run: tiny_run.Run, version: int) -> str:
    return Manifest.load(manifest_path(run.directory / "weights", 0, version)).tag.digest


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def launch(folder: Path, *flags: str, **options: Any) -> tiny_run.Run:
    folder.mkdir()
    run = tiny_run.launch(folder, *flags, **options)
    assert run.code == 0, run.output
    return run


def loads(run: tiny_run.Run, role: str, checkpoint: Path) -> dict[str, Any]:
    (loaded,) = run.events(role, "checkpoint_loaded")
    assert loaded["path"] == str(checkpoint / role) and loaded["rng"]
    assert not loaded["steps"], "it counts its steps from the beginning"
    return loaded


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_new_run_begins_with_the_models_of_a_checkpoint(tmp_path: Path) -> None:
    first = launch(tmp_path / "first", **CRITIC, num_rollout=BATCHES)
    checkpoint, before = first.directory / "checkpoints" / str(BATCHES), contents(first.directory)
    second = launch(tmp_path / "second", "--load", str(first.directory), **CRITIC, num_rollout=2, seed=8)
    assert f"load: {checkpoint} of " in second.output
    assert "weights, optimizer, random generators of actor, critic; steps, schedule and data" in second.output

    # A run of its own, from the beginning, and the other one is as it was.
    run = RunDir.load(second.directory)
    assert run.run_id != RunDir.load(first.directory).run_id and (run.lineage, run.cut) == (0, 0)
    assert contents(first.directory) == before
    with closing(sqlite3.connect(run.ledger)) as ledger:
        assert ledger.execute("SELECT lineage, parent, first_batch FROM lineages").fetchall() == [(0, None, 0)]
        assert ledger.execute("SELECT min(group_id), min(epoch), min(position) FROM groups").fetchone() == (0, 0, 0)
    assert second.column("batch") == [0, 1] and (run.checkpoints_dir / "2" / "complete.json").is_file()
    assert second.column("train/step") == second.column("train/value_step") == [1, 2]

    # With the weights of the checkpoint, and the schedule of its own options.
    assert digest(second, 0) == digest(first, BATCHES) != digest(first, 0)
    for rate in ("train/lr", "train/value_lr"):
        assert second.column(rate)[0] == first.column(rate)[0] > first.column(rate)[-1]
    assert all(loads(second, role, checkpoint)["optimizer"] for role in ("actor", "critic"))

    # Without its moments the same first gradient makes another step.
    third = launch(tmp_path / "third", "--load", str(checkpoint), "--no-load-optim", **CRITIC, num_rollout=1, seed=8)
    assert digest(third, 0) == digest(second, 0) and digest(third, 1) != digest(second, 1)
    for norm in ("train/grad_norm", "train/value_grad_norm"):
        assert third.column(norm)[0] == second.column(norm)[0]
    assert not loads(third, "actor", checkpoint)["optimizer"]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_reference_that_was_refreshed_is_taken_over_and_is_refreshed_on(tmp_path: Path) -> None:
    first = launch(tmp_path / "first", **REFRESHED, num_rollout=BATCHES)
    checkpoint = first.directory / "checkpoints" / str(BATCHES)
    second = launch(tmp_path / "second", "--load", str(checkpoint), **REFRESHED, num_rollout=3, seed=8)
    assert "of actor, reference; steps" in second.output
    loads(second, "reference", checkpoint)
    # It is two batches behind the policy there, and the policy itself at batch 2.
    kl = second.column("train/kl_loss")
    assert kl[0] > 0 and kl[2] == pytest.approx(0, abs=1e-9) and first.column("train/kl_loss")[0] == pytest.approx(0)
    assert [event["version"] for event in second.events("reference", "reference_refreshed")] == [2]
    third = launch(tmp_path / "third", "--load", str(checkpoint), num_rollout=1, seed=8)
    assert "random generators of actor; its reference is not used; steps" in third.output
    assert digest(third, 0) == digest(second, 0) == digest(first, BATCHES)
