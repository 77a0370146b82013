"""All nine algorithms on batches that a real engine sampled: the recipes of examples/algorithms without processes."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax.algorithms import registry
from relax.config.resolve import resolve
from relax.metrics import Metrics
from relax.protocol.tensors import Responses
from relax.services.actor_work import ActorWork
from relax.services.assembly import RawBatch, train_tensors
from relax.services.critic_work import CriticWork

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "topologies" / "tiny"
RECORDED = sorted((ROOT / "tests" / "recorded").glob("batch-*.npz"))
RATIOS = [name for name in registry.names() if registry.get(name).ratio]
# metric -> the algorithms that have it
OWN = {
    "train/m2po_eps_low": {"m2po"},
    "train/ppo_kl_m2_before": {"m2po"},
    "train/value_loss": {"ppo"},
    "train/ppo_kl": set(RATIOS),
    "rollout/rloo/baseline_mean": {"rloo"},
    "rollout/reinforce_pp_advantage_raw_mean": {"reinforce_plus_plus", "reinforce_plus_plus_baseline"},
    "rollout/returns": {"ppo", "reinforce_plus_plus"},
}


def recipe(name: str, **changes: Any) -> Any:
    """The options of a recipe, for the recorded batches."""
    flags = {"hf_checkpoint": str(TINY), "rollout_batch_size": 4, "n_samples_per_prompt": 8, "rollout_temperature": 0.7}
    flags |= {"num_critic_only_steps": 0, "lr": 1e-3} if name == "ppo" else {"lr": 1e-3}
    return resolve(flags | changes, ROOT / "examples" / "algorithms" / f"{name}.yaml").options


def raw(path: Path, reference: np.ndarray | None) -> RawBatch:
    with np.load(path, allow_pickle=False) as held:
        responses = Responses(held["tokens"], held["prompt_lens"], held["response_lens"])
        samples = len(held["rewards"])
        return RawBatch(
            responses=responses,
            loss_mask=np.ones(int(responses.response_lens.sum()), np.uint8),
            behaviour_logprobs=held["behaviour_logprobs"],
            reference_logprobs=reference,
            rewards=held["rewards"],
            group_ids=held["group_ids"],
            runs=np.stack([np.arange(samples), np.zeros(samples, np.int64), responses.response_lens], 1).astype(
                np.int64
            ),
            finish=np.zeros(samples, np.uint8),
        )


def train(name: str, batches: list[Path], **changes: Any) -> list[dict[str, float | None]]:
    """The metrics of each batch, trained as the services would."""
    options = recipe(name, **changes)
    spec, actor = registry.get(name), ActorWork(options, None)
    critic = CriticWork(options, None) if "critic" in spec.needs else None
    with_reference = bool(options.kl_coef or options.use_kl_loss)
    rows = []
    start = [actor.policy.logprobs(raw(path, None).responses.arrays()) for path in batches] if with_reference else None
    for i, path in enumerate(batches):
        metrics, batch = Metrics(), raw(path, start[i] if start else None)
        values = critic.values(batch.responses.arrays()) if critic else None
        arrays = train_tensors(spec, options, batch, values, 0, metrics).arrays()
        if critic:
            metrics.update(critic.train(arrays))
        metrics.update(actor.train(arrays))
        rows.append(metrics.values())
    return rows


@pytest.mark.parametrize("name", registry.names())
def test_every_algorithm_trains_on_recorded_batches(name: str) -> None:
    options, rows = recipe(name), train(name, RECORDED)
    assert len(rows) == 5
    for row in rows:
        assert all(value is not None and math.isfinite(value) for value in row.values()), row
        assert row["train/grad_norm"] > 0
        for metric, owners in OWN.items():
            assert (metric in row) == (name in owners), metric
        assert ("train/tis" in row) == ("train/tis_max" in row) == options.use_tis
        if options.use_tis:
            assert row["train/tis_min"] <= row["train/tis"] <= row["train/tis_max"]
            assert row["train/tis_min"] < row["train/tis_max"]
        assert ("train/kl_loss" in row) == options.use_kl_loss
    if name == "rloo":
        assert all(row["train/pg_clipfrac"] == 0 for row in rows)


@pytest.mark.parametrize("name", RATIOS)
def test_the_engines_log_probs_are_the_trainers_at_step_0(name: str) -> None:
    """With equal weights the ratio is 1 for every ratio-based loss, at temperature 0.7."""
    (row,) = train(name, RECORDED[:1], use_rollout_logprobs=True, use_tis=False, num_steps_per_rollout=1)
    assert abs(row["train/ppo_kl"]) < 1e-4
    assert row["train/pg_clipfrac"] < 1e-3
