"""Staleness of a batch, as the metrics tell it: over samples and over tokens, of what is trained."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.metrics import Metrics
from relax.metrics.rollout import staleness

# Sample 0 holds two versions, sample 1 one, sample 2 no token, sample 3 another.
RUNS = np.array([(0, 3, 2), (0, 5, 4), (1, 4, 3), (2, 5, 0), (3, 5, 1)], np.int64)
ALL = np.ones(10, np.uint8)


def told(runs: np.ndarray, loss_mask: np.ndarray, batch: int = 5) -> dict[str, float | None]:
    metrics = Metrics()
    staleness(metrics, batch, runs, loss_mask)
    return {name.removeprefix("train/staleness/"): value for name, value in metrics.values().items()}


def test_a_sample_is_as_stale_as_its_oldest_token() -> None:
    row = told(RUNS, ALL)
    assert row["mean"] == pytest.approx((2 + 1 + 0) / 3) and row["max"] == 2
    assert (row["hist/0"], row["hist/1"], row["hist/2"]) == pytest.approx((1 / 3, 1 / 3, 1 / 3))


def test_tokens_count_one_by_one() -> None:
    row = told(RUNS, ALL)
    assert row["tokens/mean"] == pytest.approx((2 * 2 + 1 * 3) / 10) and row["tokens/max"] == 2
    assert (row["tokens/hist/0"], row["tokens/hist/1"], row["tokens/hist/2"]) == pytest.approx((0.5, 0.3, 0.2))


def test_share_of_mixed_versions_is_that_of_what_was_sampled() -> None:
    masked = ALL.copy()
    masked[:2] = 0
    for mask in (ALL, masked):
        row = told(RUNS, mask)
        assert row["mixed_samples"] == 1 / 4 and row["mixed_tokens"] == 0.6


def test_a_masked_token_makes_nothing_stale() -> None:
    mask = ALL.copy()
    mask[:2] = 0
    row = told(RUNS, mask)
    assert row["max"] == 1 and row["mean"] == pytest.approx(1 / 3)
    assert row["tokens/mean"] == pytest.approx(3 / 8) and "tokens/hist/2" not in row


def test_two_runs_of_one_version_are_no_mixture() -> None:
    row = told(np.array([(0, 4, 2), (0, 4, 1)]), np.ones(3, np.uint8))
    assert row["mixed_samples"] == row["mixed_tokens"] == 0 and row["max"] == 1


def test_a_batch_in_which_nothing_is_trained_has_no_mean_and_no_stale_sample() -> None:
    row = told(RUNS, np.zeros(10, np.uint8))
    assert row["mean"] is None and row["max"] == 0 and not any("hist" in name for name in row)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_it_is_what_one_would_count_token_by_token(data: st.DataObject) -> None:
    run = st.tuples(st.integers(0, 6), st.integers(0, 4))
    samples = data.draw(st.lists(st.lists(run, min_size=1, max_size=3), min_size=1, max_size=6))
    rows = [(i, v, n) for i, runs in enumerate(samples) for v, n in runs]
    versions = [[v for v, n in runs for _ in range(n)] for runs in samples]
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=(n := sum(map(len, versions))), max_size=n)), bool)
    flags = iter(mask)
    kept = [[v for v in sample if next(flags)] for sample in versions]
    # Runs of different samples may come in any order; those of one sample are in token order.
    order = data.draw(st.permutations([i for i, _, _ in rows]))
    queues = {i: [row for row in rows if row[0] == i] for i in range(len(samples))}
    row = told(np.array([queues[i].pop(0) for i in order]), mask.astype(np.uint8), batch=7)
    ages = [7 - min(sample) for sample in kept if sample]
    tokens = [7 - v for sample in kept for v in sample]
    assert row["max"] == max(ages, default=0) and row["tokens/max"] == max(tokens, default=0)
    if ages:
        assert row["mean"] == pytest.approx(np.mean(ages)) and row["tokens/mean"] == pytest.approx(np.mean(tokens))
        assert sum(v for name, v in row.items() if name.startswith("hist/")) == pytest.approx(1)
        assert row[f"tokens/hist/{tokens[0]}"] == pytest.approx(tokens.count(tokens[0]) / len(tokens))
    assert row["mixed_samples"] == pytest.approx(np.mean([len(set(sample)) > 1 for sample in versions]))
