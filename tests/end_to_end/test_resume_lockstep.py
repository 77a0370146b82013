"""A lockstep run of real models that is killed and resumed computes what the unbroken one does, to the bit."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from killing import Life, trained_prompts

from relax.metrics.history import read_rows
from relax.weights.manifest import Manifest
from relax.weights.publication import manifest_path

# One start of an engine and a trainer.
START = 240.0
# What a row says of the work, not of the time that it took.
NUMBERS = ("rollout/raw_reward", "train/loss", "train/grad_norm", "train/entropy", "train/lr", "train/step", "step")

# Every model of the run is saved: the value model, and a reference that is not --ref-load any more.
CRITIC: dict[str, Any] = {"advantage_estimator": "ppo", "services": {"critic": {}}}
REFRESHED: dict[str, Any] = {
    "services": {"reference": {}},
    "ref_load": str(tiny_run.TINY),
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "ref_update_interval": 2,
}


def digest(directory: Path, lineage: int, version: int) -> str:
    return Manifest.load(manifest_path(directory / "weights", lineage, version)).tag.digest


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("batches", "kills", "every", "chosen_options"),
    [(12, 2, 3, {}), (10, 2, 3, CRITIC), (10, 2, 3, REFRESHED), (60, 20, 2, {})],
    ids=["few", "critic", "reference", "many"],
)
def test_losses_and_weights_are_those_of_the_unbroken_run(
    tmp_path: Path, batches: int, kills: int, every: int, chosen_options: dict[str, Any]
) -> None:
    chosen = random.Random(kills)
    options: dict[str, Any] = {"num_rollout": batches, "lr_decay_style": "cosine", "save_interval": every}
    options |= chosen_options
    lives = []
    for name in ("whole", "broken"):
        folder = tmp_path / name
        folder.mkdir()
        tiny_run.write_topology(folder, **options)
        life = Life(folder)
        for lineage in range(kills if name == "broken" else 0):
            assert life.lineage_is(lineage), life.output
            goal = min(life.trained() + chosen.randrange(1, every + 2), batches - 1 + life.trained() // batches)
            if not life.until(lambda life=life, goal=goal: life.trained() >= goal, START):
                break  # it came to its end before
            time.sleep(chosen.random() * 0.5)
            life.kill()
            life = Life(folder, "--resume")
        assert life.end(patience=batches * 10.0 + START) == 0, life.output
        lives.append(life)
    whole, broken = (read_rows(life.directory / "metrics.jsonl") for life in lives)
    assert [row["batch"] for row in broken] == [row["batch"] for row in whole] == list(range(batches))
    for batch, row in enumerate(whole):
        names = [name for name in row if name in NUMBERS or name.startswith("train/value")]
        assert {n: row[n] for n in names} == {n: broken[batch].get(n) for n in names}, f"batch {batch}"
    assert len({row["lineage"] for row in broken}) > 1, "some were trained before a kill, some after"
    ends = [digest(life.directory, life.lineage(), batches) for life in lives]
    assert ends[0] == ends[1]
    assert trained_prompts(lives[0].directory) == trained_prompts(lives[1].directory)
