"""What a batch of rollouts looked like: rewards, lengths, staleness. Pure functions over numpy arrays."""

import numpy as np

from relax.metrics import Metrics

# A sample passes when its reward is at least this; verifiers pay 1 for a right answer.
PASS_REWARD = 1.0


def rewards(metrics: Metrics, rewards: np.ndarray, group_ids: np.ndarray) -> None:
    """Rewards [samples], NaN where the function abstained, and their groups [samples]."""
    scored = np.isfinite(rewards)
    metrics.mean("rollout/raw_reward", rewards[scored].sum(), scored.sum())
    constant = 0
    groups = np.unique(group_ids)
    for group in groups:
        of_group = rewards[(group_ids == group) & scored]
        constant += len(of_group) == 0 or of_group.max() == of_group.min()
        passed = int((of_group >= PASS_REWARD).sum())
        for k in _powers_of_two(len(of_group)):
            metrics.mean(f"rollout/pass@{k}", pass_at_k(len(of_group), passed, k), 1)
    metrics.mean("rollout/zero_std", constant, len(groups))


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Unbiased probability that one of k draws passes, from `passed` of n (Chen et al. 2021, equation 1)."""
    if n - passed < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - passed + 1, n + 1)))


def lengths(metrics: Metrics, response_lens: np.ndarray, truncated: np.ndarray) -> None:
    """Response lengths in tokens [samples] and whether the engine cut the response at the limit [samples]."""
    metrics.mean("rollout/response_len/mean", response_lens.sum(), len(response_lens))
    metrics.last("rollout/response_len/median", float(np.median(response_lens)))
    metrics.max("rollout/response_len/max", response_lens.max())
    metrics.min("rollout/response_len/min", response_lens.min())
    metrics.mean("rollout/truncated_ratio", truncated.sum(), len(truncated))


def staleness(metrics: Metrics, batch: int, runs: np.ndarray) -> None:
    """Staleness of batch `batch` from its version runs [R, 3] (sample, version, tokens).

    Of a token: batch index minus the version that sampled it. Of a sample: that of its oldest token.
    """
    oldest: dict[int, int] = {}
    for sample, version, _ in runs.tolist():
        oldest[sample] = min(version, oldest.get(sample, version))
    of_samples = batch - np.array(list(oldest.values()))
    metrics.mean("train/staleness/mean", of_samples.sum(), len(of_samples))
    metrics.max("train/staleness/max", of_samples.max())
    for value, count in zip(*np.unique(of_samples, return_counts=True), strict=True):
        metrics.mean(f"train/staleness/hist/{value}", count, len(of_samples))
    of_tokens, tokens = batch - runs[:, 1], runs[:, 2]
    metrics.mean("train/staleness/tokens/mean", (of_tokens * tokens).sum(), tokens.sum())
    metrics.max("train/staleness/tokens/max", of_tokens[tokens > 0].max() if tokens.any() else 0)
    for value in np.unique(of_tokens):
        share = tokens[of_tokens == value].sum()
        metrics.mean(f"train/staleness/tokens/hist/{value}", share, tokens.sum())
    mixed = [s for s in oldest if len(set(runs[runs[:, 0] == s, 1].tolist())) > 1]
    metrics.mean("train/staleness/mixed_tokens", tokens[np.isin(runs[:, 0], mixed)].sum(), tokens.sum())


def _powers_of_two(n: int) -> list[int]:
    return [1 << i for i in range(n.bit_length())]
