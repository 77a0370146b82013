"""Real, short runs of the algorithms that need more than the usual services, or their own batch shape."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny_run

from relax.weights.manifest import Manifest
from relax.weights.publication import manifest_path

REFERENCE = {"services": {"reference": {}}, "ref_load": str(tiny_run.TINY), "normalize_advantages": True}
RUNS: dict[str, dict[str, Any]] = {
    # Two batches train the critic alone. So small a clip lets a value of another critic version not pass unseen.
    "ppo": {
        "advantage_estimator": "ppo",
        "services": {"critic": {}},
        "lambd": 0.95,
        "num_critic_only_steps": 2,
        "critic_lr": 1e-3,
        "lr_decay_style": "linear",
        "value_clip": 1e-6,
        "num_rollout": 5,
    },
    "reinforce_plus_plus": REFERENCE | {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1, "num_rollout": 4},
    # Stale samples, and a reference that follows the policy: groups scored by the older one are scored again.
    "reinforce_plus_plus_baseline": REFERENCE
    | {
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "use_kl_loss": True,
        "kl_loss_type": "k2",
        "kl_loss_coef": 0.01,
        "ref_update_interval": 2,
        "max_staleness": 2,
        "use_tis": True,
        "num_rollout": 6,
    },
    "rloo": {"advantage_estimator": "rloo", "calculate_per_token_loss": True, "num_rollout": 4},
}
# A metric, by the start of its name -> the runs that it belongs to.
OWN = {
    "train/value_": {"ppo"},
    "train/kl_loss": {"reinforce_plus_plus_baseline"},
    "train/tis": {"reinforce_plus_plus_baseline"},
    "rollout/reinforce_pp_": {"reinforce_plus_plus", "reinforce_plus_plus_baseline"},
    "rollout/returns": {"ppo", "reinforce_plus_plus"},
    "rollout/rloo/": {"rloo"},
    "train/ppo_kl": {"ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"},
    "pipeline/reference_": {"reinforce_plus_plus", "reinforce_plus_plus_baseline"},
    "perf/critic_": {"ppo"},
    "train/ppo_kl_m2": set(),
}


WIDE = ("rloo", "reinforce_plus_plus")
NAMES = [pytest.param(name, marks=[pytest.mark.long] if name in WIDE else []) for name in RUNS]


class Runs:
    """Each run is made when it is first asked for, and once."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self.folders = folders
        self.made: dict[str, tiny_run.Run] = {}

    def __getitem__(self, name: str) -> tiny_run.Run:
        if name not in self.made:
            self.made[name] = tiny_run.launch(self.folders.mktemp(name), **RUNS[name])
        return self.made[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_ends_by_itself_with_one_complete_row_a_batch(runs: Runs, name: str) -> None:
    run = runs[name]
    assert run.code == 0, run.output
    assert run.column("batch") == list(range(RUNS[name]["num_rollout"]))
    assert not any("incomplete" in row for row in run.rows)


@pytest.mark.parametrize("name", NAMES)
def test_metrics_appear_where_they_belong_and_only_there(runs: Runs, name: str) -> None:
    last = runs[name].rows[-1]
    for start, owners in OWN.items():
        assert any(metric.startswith(start) for metric in last) == (name in owners), start
    assert (last["train/pg_clipfrac"] == 0) or name != "rloo"


def test_batches_for_the_critic_alone_leave_the_policy_as_it_was(runs: Runs) -> None:
    run = runs["ppo"]
    tags = [Manifest.load(manifest_path(run.directory / "weights", 0, version)).tag for version in range(6)]
    assert [tag.step for tag in tags] == [0, 0, 0, 1, 2, 3]
    digests = [tag.digest for tag in tags]
    assert len(set(digests[:3])) == 1 and len(set(digests[2:])) == 4
    assert ["train/loss" in row for row in run.rows] == [False, False, True, True, True]
    assert [row["train/value_step"] for row in run.rows] == [1, 2, 3, 4, 5]


def test_the_schedules_of_actor_and_critic_count_their_own_steps(runs: Runs) -> None:
    rows = runs["ppo"].rows
    assert [row["train/lr"] for row in rows[2:]] == pytest.approx([2e-3 * (1 - s / 3) for s in range(3)])
    assert [row["train/value_lr"] for row in rows] == pytest.approx([1e-3 * (1 - s / 5) for s in range(5)])


def test_the_values_of_a_batch_are_those_of_the_critic_that_trains_on_it(runs: Runs) -> None:
    """One step a batch, so the critic begins it with the values that the advantages were made from: none is clipped."""
    run = runs["ppo"]
    assert run.column("train/value_clipfrac") == [0.0] * 5
    assert min(run.column("train/value_grad_norm")) > 0, "a critic that does not change would agree trivially"


@pytest.mark.long
def test_the_kl_to_the_reference_is_part_of_the_return(runs: Runs) -> None:
    """gamma is 1, so a sample's mean return lies below its reward by the KL that is still to come: none at batch 0."""
    run = runs["reinforce_plus_plus"]
    missing = []
    for row in run.rows:
        table = pq.read_table(run.directory / "samples" / f"{row['batch']:06d}.parquet").to_pydict()
        lens, rewards = np.array(table["response_len"]), np.array(table["reward"])
        missing.append((rewards * lens).sum() / lens.sum() - row["rollout/reinforce_pp_advantage_raw_mean"])
    assert abs(missing[0]) < 1e-5
    assert min(missing[1:]) > 1e-3


def test_every_batch_is_compared_with_its_one_version_of_the_reference(runs: Runs) -> None:
    """Where a refresh falls on the batch, the reference is the policy that begins it, to the bit."""
    run = runs["reinforce_plus_plus_baseline"]
    assert run.column("pipeline/reference_version") == [0, 0, 2, 2, 4, 4]
    assert [kl == 0 for kl in run.column("train/kl_loss")] == [True, False] * 3
    assert max(run.column("train/staleness/max")) <= 2
    assert sum(run.column("pipeline/reference_rescored")) > 0, "no group had been scored before its reference came"
    assert [record["version"] for record in run.events("reference", "reference_refreshed")] == [2, 4]


@pytest.mark.long
def test_a_critic_of_two_ranks(tmp_path: Path) -> None:
    run = tiny_run.launch(tmp_path, **(RUNS["ppo"] | {"services": {"critic": {"tensor_parallel_size": 2}}}))
    assert run.code == 0, run.output
    assert run.column("train/value_clipfrac") == [0.0] * 5


@pytest.mark.long
def test_a_reference_of_two_ranks_beside_an_actor_of_one(tmp_path: Path) -> None:
    """Another grid sums in another order, so the KL where a refresh falls on the batch is 0 up to rounding alone."""
    services = {"reference": {"tensor_parallel_size": 2}}
    run = tiny_run.launch(tmp_path, **(RUNS["reinforce_plus_plus_baseline"] | {"services": services}))
    assert run.code == 0, run.output
    kl = run.column("train/kl_loss")
    assert max(kl[::2]) < 1e-8 and min(kl[1::2]) > 1e-5
