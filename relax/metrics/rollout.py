"""What a batch of rollouts looked like: rewards, lengths, staleness, versions. Pure functions over numpy arrays."""

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


def staleness(metrics: Metrics, batch: int, runs: np.ndarray, loss_mask: np.ndarray) -> None:
    """Staleness of batch `batch`: its version runs [R, 3] (sample, version, tokens), those of a sample in token order,
    and its loss mask [tokens], sample after sample.

    Of a token: batch index minus the version that sampled it. Of a sample: that of its oldest token. Tokens outside the
    loss mask train nothing and have none, nor has a sample without others. A sample is mixed when two versions sampled
    it, whatever the mask leaves of it.
    """
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    sample, version, sampled = runs.T
    before = np.concatenate([[0], np.cumsum(loss_mask, dtype=np.int64)])
    ends = np.cumsum(sampled)
    trained = before[ends] - before[ends - sampled]
    oldest, _ = _range(sample, version, trained > 0)
    counted = oldest[oldest != _NONE]
    _spread(metrics, "train/staleness", batch - counted, np.ones(len(counted), np.int64))
    _spread(metrics, "train/staleness/tokens", batch - version[trained > 0], trained[trained > 0])
    oldest, newest = _range(sample, version, sampled > 0)
    mixed = (oldest != _NONE) & (newest > oldest)
    metrics.mean("train/staleness/mixed_samples", mixed.sum(), len(mixed))
    metrics.mean("train/staleness/mixed_tokens", sampled[mixed[sample]].sum(), sampled.sum())


_NONE = np.iinfo(np.int64).max


def _range(sample: np.ndarray, version: np.ndarray, held: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Oldest and newest version of each sample over its runs that are `held`; _NONE and -_NONE where none is."""
    samples = int(sample.max(initial=-1)) + 1
    oldest, newest = np.full(samples, _NONE), np.full(samples, -_NONE)
    np.minimum.at(oldest, sample[held], version[held])
    np.maximum.at(newest, sample[held], version[held])
    return oldest, newest


def _spread(metrics: Metrics, name: str, values: np.ndarray, weights: np.ndarray) -> None:
    """Mean, max and histogram (as shares) of whole numbers, each counted `weights` times."""
    metrics.mean(f"{name}/mean", (values * weights).sum(), weights.sum())
    metrics.max(f"{name}/max", values.max(initial=0))
    for value in np.unique(values):
        metrics.mean(f"{name}/hist/{value}", weights[values == value].sum(), weights.sum())


def _powers_of_two(n: int) -> list[int]:
    return [1 << i for i in range(n.bit_length())]
