"""From the rewards of a whole batch to advantages: by group id, whatever the order, abstentions included."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.algorithms import advantages, normalizers, ragged, registry, signal
from relax.config.options import Options

NAN = math.nan
REWARDS = np.array([1.0, 0.0, 0.5, 2.0, 2.0, NAN, 3.0, 1.0])
GROUPS = np.array([7, 3, 7, 3, 7, 7, 3, 3])
LENS = np.array([2, 3, 0, 1, 4, 2, 1, 3], np.int32)


def loss_mask(rewards=REWARDS, lens=LENS):
    return np.repeat(np.isfinite(rewards), lens).astype(np.uint8)


def made_by(name, options=None, **more):
    return signal.batch_advantages(registry.get(name), options or Options(), REWARDS, GROUPS, LENS, loss_mask(), **more)


@pytest.mark.parametrize(
    ("name", "normalize"),
    [
        ("grpo", normalizers.group_mean_std),
        ("gspo", normalizers.group_mean_std),
        ("cispo", normalizers.group_mean_std),
        ("sapo", normalizers.group_mean_std),
        ("m2po", normalizers.raw),
        ("rloo", normalizers.leave_one_out),
        ("reinforce_plus_plus_baseline", normalizers.group_mean),
    ],
)
def test_each_group_is_normalized_by_itself_over_its_scored_samples(name, normalize):
    seven, three = normalize(REWARDS[[0, 2, 4]]).numpy(), normalize(REWARDS[[1, 3, 6, 7]]).numpy()
    scores = [seven[0], three[0], seven[1], three[1], seven[2], 0.0, three[2], three[3]]
    made = made_by(name)
    np.testing.assert_allclose(made.scores, scores)
    np.testing.assert_allclose(made.advantages, np.repeat(scores, LENS) * loss_mask(), rtol=1e-6)
    assert made.advantages.dtype == np.float32 and made.returns is None


@settings(deadline=None, max_examples=50)
@given(st.permutations(range(len(REWARDS))), st.sampled_from(["grpo", "rloo", "m2po", "reinforce_plus_plus_baseline"]))
def test_order_of_arrival_does_not_matter(order, name):
    order = np.array(order)
    rewards, lens = REWARDS[order], LENS[order]
    shuffled = signal.batch_advantages(
        registry.get(name), Options(normalize_advantages=True), rewards, GROUPS[order], lens, loss_mask(rewards, lens)
    )
    straight = made_by(name, Options(normalize_advantages=True))
    np.testing.assert_allclose(shuffled.scores, straight.scores[order], atol=1e-12)
    rows = np.split(straight.advantages, np.cumsum(LENS)[:-1])
    np.testing.assert_allclose(shuffled.advantages, np.concatenate([rows[i] for i in order]), rtol=1e-5, atol=1e-6)


def test_group_of_equal_rewards_among_others_gets_exactly_zero():
    rewards, groups = np.array([5.0, 5, 5, 0, 1]), np.array([1, 1, 1, 2, 2])
    lens = np.ones(5, np.int32)
    made = signal.batch_advantages(registry.get("grpo"), Options(), rewards, groups, lens, np.ones(5, np.uint8))
    assert made.advantages[:3].tolist() == [0, 0, 0]


def test_reward_of_an_empty_response_counts_in_its_group():
    assert made_by("rloo").scores[2] == pytest.approx(0.5 - (1.0 + 2.0) / 2)


def test_unusable_groups_say_why():
    rloo, grpo = registry.get("rloo"), registry.get("grpo")
    assert signal.unusable(rloo, np.array([1.0, NAN, NAN])) == "too_few_rewards"
    assert signal.unusable(registry.get("reinforce_plus_plus_baseline"), np.array([1.0, NAN])) == "too_few_rewards"
    assert signal.unusable(rloo, np.array([1.0, NAN, 0.0])) is None
    assert signal.unusable(grpo, np.array([1.0, NAN])) is None
    assert signal.unusable(grpo, np.array([NAN, NAN])) == "too_few_rewards"
    assert signal.unusable(grpo, np.array([1.0, math.inf])) == "bad_reward"


def test_a_group_that_cannot_be_trained_is_refused_by_id():
    with pytest.raises(ValueError, match=r"group 4 cannot be trained \(too_few_rewards\)"):
        signal.batch_advantages(
            registry.get("rloo"),
            Options(),
            np.array([1.0, NAN]),
            np.array([4, 4]),
            np.array([1, 0], np.int32),
            np.ones(1, np.uint8),
        )


def test_abstaining_sample_must_be_masked():
    with pytest.raises(ValueError, match="abstained has loss tokens"):
        signal.batch_advantages(registry.get("grpo"), Options(), REWARDS, GROUPS, LENS, np.ones(LENS.sum(), np.uint8))


def test_arrays_of_another_length_are_refused_by_name():
    with pytest.raises(ValueError, match="loss_mask has 3 entries, response_lens add up to 16"):
        signal.batch_advantages(registry.get("grpo"), Options(), REWARDS, GROUPS, LENS, np.ones(3, np.uint8))


def test_disabled_normalization_leaves_raw_rewards():
    made = made_by("grpo", Options(disable_rewards_normalization=True))
    np.testing.assert_array_equal(made.scores, np.nan_to_num(REWARDS))


def test_dr_grpo_does_not_divide_by_the_std():
    made = made_by("grpo", Options(disable_grpo_std_normalization=True))
    np.testing.assert_allclose(made.scores, made_by("reinforce_plus_plus_baseline").scores)


@pytest.mark.parametrize(
    ("name", "ddof", "floor"), [("grpo", 1, False), ("m2po", 1, False), ("reinforce_plus_plus_baseline", 0, True)]
)
def test_whitening_is_over_the_whole_batch(name, ddof, floor):
    plain = made_by(name)
    expected = advantages.whiten(
        torch.from_numpy(np.repeat(plain.scores, LENS)), torch.from_numpy(loss_mask()), ddof, floor
    )
    np.testing.assert_allclose(
        made_by(name, Options(normalize_advantages=True)).advantages, expected.numpy(), rtol=1e-5, atol=1e-6
    )


def flat(seed):
    return np.random.default_rng(seed).normal(size=LENS.sum()).astype(np.float32)


def test_reinforce_plus_plus_shapes_rewards_by_the_kl_of_the_sampling_policy_and_whitens():
    behaviour, reference = flat(0), flat(1)
    options = Options(normalize_advantages=True, kl_coef=0.1, gamma=0.9)
    made = made_by("reinforce_plus_plus", options, behaviour_logprobs=behaviour, reference_logprobs=reference)
    kl = ragged.pad((behaviour.astype(np.float64) - reference.astype(np.float64)), LENS)
    mask = torch.from_numpy(ragged.pad(loss_mask(), LENS))
    returns = advantages.reinforce_plus_plus_returns(
        torch.from_numpy(np.nan_to_num(REWARDS)), torch.from_numpy(kl), mask, 0.1, 0.9
    )
    expected = advantages.whiten(returns, mask, ddof=0, floor=True)
    np.testing.assert_allclose(made.advantages, ragged.unpad(expected.numpy(), LENS), rtol=1e-5, atol=1e-6)
    tokens = mask.sum()
    raw = returns[mask.bool()].numpy()
    metrics = {name: total / count for name, (total, count) in made.metrics.items()}
    assert metrics["rollout/reinforce_pp_advantage_raw_mean"] == pytest.approx(raw.mean())
    assert metrics["rollout/reinforce_pp_advantage_raw_std"] == pytest.approx(raw.std())
    assert metrics["rollout/reinforce_pp_advantage_normalized_mean"] == pytest.approx(0, abs=1e-9)
    assert metrics["rollout/reinforce_pp_advantage_normalized_std"] == pytest.approx(1)
    assert metrics["rollout/reinforce_pp_valid_token_count"] == tokens
    assert metrics["rollout/reinforce_pp_zero_variance"] == 0
    assert metrics["rollout/returns"] == pytest.approx(raw.mean())


def test_ppo_estimates_advantages_and_returns_from_values():
    values = flat(2)
    made = made_by("ppo", Options(gamma=0.9, lambd=0.8), values=values)
    mask = torch.from_numpy(ragged.pad(loss_mask(), LENS))
    token_rewards = advantages.last_token_rewards(torch.from_numpy(np.nan_to_num(REWARDS)), mask)
    padded = torch.from_numpy(ragged.pad(values.astype(np.float64), LENS))
    expected, returns = advantages.gae(token_rewards, padded, mask, 0.9, 0.8)
    np.testing.assert_allclose(made.advantages, ragged.unpad(expected.numpy(), LENS), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made.returns, ragged.unpad(returns.numpy(), LENS), rtol=1e-5, atol=1e-6)


def test_whitened_ppo_advantages_leave_the_returns_alone():
    values = flat(2)
    plain = made_by("ppo", values=values)
    whitened = made_by("ppo", Options(normalize_advantages=True), values=values)
    assert whitened.advantages[loss_mask() == 1].mean() == pytest.approx(0, abs=1e-6)
    np.testing.assert_array_equal(whitened.returns, plain.returns)


@pytest.mark.parametrize(("name", "missing"), [("ppo", "values"), ("reinforce_plus_plus", "reference_logprobs")])
def test_missing_inputs_are_named(name, missing):
    with pytest.raises(ValueError, match=missing):
        made_by(name)


def test_batch_is_padded_in_blocks_without_changing_the_result(monkeypatch):
    values = flat(2)
    whole = made_by("ppo", values=values)
    monkeypatch.setattr(ragged, "_PADDED_TOKENS", 9)
    cut = made_by("ppo", values=values)
    np.testing.assert_array_equal(cut.advantages, whole.advantages)
    np.testing.assert_array_equal(cut.returns, whole.returns)


def test_batch_of_empty_responses_is_legal():
    lens = np.zeros(4, np.int32)
    made = signal.batch_advantages(
        registry.get("grpo"),
        Options(normalize_advantages=True),
        np.array([0.0, 1, 0, 1]),
        np.array([1, 1, 2, 2]),
        lens,
        np.zeros(0, np.uint8),
    )
    assert len(made.advantages) == 0 and np.isfinite(made.scores).all()


def test_rloo_reports_its_baseline_and_what_carries_no_signal():
    rewards, groups = np.array([1.0, 0, 0, 2, 2, 2]), np.array([1, 1, 1, 2, 2, 2])
    lens = np.array([3, 1, 0, 2, 2, 2], np.int32)
    made = signal.batch_advantages(
        registry.get("rloo"), Options(), rewards, groups, lens, np.ones(10, np.uint8), incomplete_groups=2
    )
    metrics = {k.removeprefix("rollout/rloo/"): t / n for k, (t, n) in made.metrics.items() if "/rloo/" in k}
    assert metrics == pytest.approx(
        {
            "baseline_mean": (0 + 0.5 + 0.5 + 2 + 2 + 2) / 6,
            "adv_abs_mean": (1 + 0.5 + 0.5) / 6,
            "no_signal_frac": 6 / 10,
            "empty_response_frac": 1 / 6,
            "zero_adv_group_frac": 1 / 2,
            "dropped_group_frac": 2 / 4,
        }
    )


def test_rloo_metrics_belong_to_rloo_alone():
    def rloo(made):
        return [name for name in made.metrics if "/rloo/" in name]

    assert rloo(made_by("rloo"))
    assert not rloo(made_by("grpo"))


def test_metrics_belong_to_the_algorithm():
    assert set(made_by("grpo").metrics) == {"rollout/advantages"}
    assert set(made_by("ppo", values=flat(0)).metrics) == {"rollout/advantages", "rollout/returns"}
    assert not any("returns" in name for name in made_by("reinforce_plus_plus_baseline").metrics)
