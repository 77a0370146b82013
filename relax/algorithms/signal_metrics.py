"""What the training signal of a batch looked like, as (sum, count) by name. These observe and change nothing."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from relax.algorithms.registry import LEAVE_ONE_OUT, RETURNS, AlgorithmSpec

Metrics = dict[str, tuple[float, float]]


def of_tokens(
    spec: AlgorithmSpec, options: Any, raw: np.ndarray, final: np.ndarray, returns: np.ndarray | None, mask: np.ndarray
) -> Metrics:
    """Advantages before (`raw`) and after (`final`) whitening, and returns, over the loss tokens; flat arrays."""
    tokens = int(mask.sum())
    metrics = {"rollout/advantages": (float(final[mask].sum()), float(tokens))}
    if returns is None and spec.advantage is RETURNS and options.custom_advantage_path is None:
        returns = raw
    if returns is not None:
        metrics["rollout/returns"] = (float(returns[mask].sum()), float(tokens))
    if spec.name.startswith("reinforce_plus_plus"):
        for name, x in (("raw", raw[mask]), ("normalized", final[mask])):
            metrics[f"rollout/reinforce_pp_advantage_{name}_mean"] = (float(x.sum()), float(tokens))
            metrics[f"rollout/reinforce_pp_advantage_{name}_std"] = (float(x.std()) if tokens else 0.0, 1.0)
        flat = tokens == 0 or raw[mask].max() == raw[mask].min()
        metrics["rollout/reinforce_pp_valid_token_count"] = (float(tokens), 1.0)
        metrics["rollout/reinforce_pp_zero_variance"] = (float(flat), 1.0)
    return metrics


def of_groups(
    spec: AlgorithmSpec,
    options: Any,
    rewards: np.ndarray,
    scores: np.ndarray,
    group_ids: np.ndarray,
    response_lens: np.ndarray,
    mask: np.ndarray,
    incomplete_groups: int,
) -> Metrics:
    """RLOO's own: baseline, size of the advantages, and how much of the batch carries no signal. Nothing when a custom
    hook replaces the signal, because these numbers would then describe something that is not trained on."""
    replaced = options.custom_reward_post_process_path or options.custom_advantage_path
    if spec.normalizer is not LEAVE_ONE_OUT or replaced:
        return {}
    scored = np.isfinite(rewards)
    samples, groups = float(scored.sum()), np.unique(group_ids)
    silent = np.repeat(scores == 0, response_lens) & mask
    without_signal = sum(not scores[members].any() for _, members in by_group(group_ids))
    counts = {
        "baseline_mean": (float((rewards - scores)[scored].sum()), samples),
        "adv_abs_mean": (float(np.abs(scores[scored]).sum()), samples),
        "no_signal_frac": (float(silent.sum()), float(mask.sum())),
        "empty_response_frac": (float((response_lens == 0).sum()), float(len(rewards))),
        "zero_adv_group_frac": (float(without_signal), float(len(groups))),
        "dropped_group_frac": (float(incomplete_groups), float(len(groups) + incomplete_groups)),
    }
    return {f"rollout/rloo/{name}": metric for name, metric in counts.items()}


def by_group(group_ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(group id, indices of its samples in their order), whatever the order the samples came in."""
    order = np.argsort(group_ids, kind="stable")
    groups, starts = np.unique(group_ids[order], return_index=True)
    yield from zip(groups.tolist(), np.split(order, starts[1:]), strict=False)
