"""Normalizers and advantage functions against brute-force loops that follow the definitions literally."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax.algorithms import advantages, normalizers

NUMBER = st.floats(-50, 50, allow_subnormal=False)
REWARD = st.one_of(st.sampled_from([0.0, 1.0, 0.1]), NUMBER)
UNIT = st.floats(0, 1, allow_subnormal=False)


@st.composite
def padded(draw, *fills, gaps=True):
    """A mask [B, T] and one tensor of numbers a fill, with the fill outside the mask."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    lengths = [draw(st.integers(0, columns)) for _ in range(rows)]
    mask = np.arange(columns)[None] < np.array(lengths)[:, None]
    if gaps and draw(st.booleans()):
        mask &= np.array(draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))).reshape(
            mask.shape
        )
    made = []
    for fill in fills:
        flat = draw(st.lists(NUMBER, min_size=rows * columns, max_size=rows * columns))
        made.append(torch.from_numpy(np.where(mask, np.array(flat).reshape(mask.shape), fill)))
    return torch.from_numpy(mask.astype(np.uint8)), *made


def close(seen, expected):
    torch.testing.assert_close(
        seen, torch.as_tensor(expected, dtype=seen.dtype).reshape(seen.shape), rtol=1e-9, atol=1e-9
    )


@settings(deadline=None)
@given(st.lists(REWARD, min_size=1, max_size=9), st.booleans())
def test_group_mean_std_is_the_definition(rewards, use_std):
    mean = sum(rewards) / len(rewards)
    expected = [0.0] * len(rewards)
    if max(rewards) != min(rewards):
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        expected = [(r - mean) / (std + 1e-6) if use_std else r - mean for r in rewards]
    torch.testing.assert_close(
        normalizers.group_mean_std(rewards, use_std), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6
    )


@settings(deadline=None)
@given(st.lists(REWARD, min_size=2, max_size=9))
def test_leave_one_out_subtracts_the_mean_of_the_others(rewards):
    others = [(sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    close(normalizers.leave_one_out(rewards), [r - o for r, o in zip(rewards, others, strict=True)])


@settings(deadline=None)
@given(st.lists(REWARD, min_size=1, max_size=9))
def test_group_mean_subtracts_the_mean(rewards):
    close(normalizers.group_mean(rewards), [r - sum(rewards) / len(rewards) for r in rewards])


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7, 1e9])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_give_exactly_zero(reward, size):
    for normalize in (normalizers.group_mean_std, normalizers.group_mean, normalizers.leave_one_out):
        assert normalize([reward] * size).tolist() == [0.0] * size


@pytest.mark.parametrize("normalize", [normalizers.group_mean_std, normalizers.group_mean])
def test_single_sample_gives_zero(normalize):
    assert normalize([3.5]).tolist() == [0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "normalize", [normalizers.group_mean_std, normalizers.group_mean, normalizers.leave_one_out, normalizers.raw]
)
def test_reward_that_is_no_number_is_refused_by_position(normalize, bad):
    with pytest.raises(ValueError, match="position 2 of 3"):
        normalize([1.0, 0.0, bad])


def test_leave_one_out_of_one_sample_is_refused():
    with pytest.raises(ValueError, match="at least 2 scored"):
        normalizers.leave_one_out([1.0])


def test_normalizers_take_one_group_only():
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        normalizers.group_mean([[1.0, 2.0], [3.0, 4.0]])


def test_normalizers_compute_in_float64_and_keep_the_dtype():
    # In float32 the deviations of 2^24 + {0, 2, 4} survive, the sum for their mean does not.
    rewards = torch.tensor([16777216.0, 16777218.0, 16777220.0], dtype=torch.float32)
    made = normalizers.group_mean(rewards)
    assert made.dtype == torch.float32 and made.tolist() == [-2.0, 0.0, 2.0]
    assert normalizers.group_mean([1, 0]).dtype == torch.float64


@settings(deadline=None)
@given(padded(math.nan, math.inf), UNIT, UNIT)
def test_gae_is_the_recursion_over_valid_tokens(tensors, gamma, lambd):
    mask, rewards, values = tensors
    expected, expected_returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for b in range(len(mask)):
        valid = [t for t in range(mask.shape[1]) if mask[b, t]]
        for i, t in enumerate(valid):
            total, weight = 0.0, 1.0
            for j in range(i, len(valid)):
                following = float(values[b, valid[j + 1]]) if j + 1 < len(valid) else 0.0
                total += weight * (float(rewards[b, valid[j]]) + gamma * following - float(values[b, valid[j]]))
                weight *= gamma * lambd
            expected[b, t] = total
            expected_returns[b, t] = total + float(values[b, t])
    made, returns = advantages.gae(rewards, values, mask, gamma, lambd)
    close(made, expected)
    close(returns, expected_returns)


@settings(deadline=None)
@given(padded(math.nan), st.data(), UNIT, UNIT)
def test_reinforce_plus_plus_returns_are_the_discounted_sums(tensors, data, kl_coef, gamma):
    mask, kl = tensors
    reward = data.draw(st.lists(NUMBER, min_size=len(mask), max_size=len(mask)))
    expected = np.zeros(mask.shape)
    for b in range(len(mask)):
        valid = [t for t in range(mask.shape[1]) if mask[b, t]]
        token = [-kl_coef * float(kl[b, t]) if mask[b, t] else 0.0 for t in range(mask.shape[1])]
        if valid:
            token[valid[-1]] += reward[b]
        for t in valid:
            expected[b, t] = sum(gamma ** (s - t) * token[s] for s in range(t, len(token)))
    made = advantages.reinforce_plus_plus_returns(torch.tensor(reward, dtype=torch.float64), kl, mask, kl_coef, gamma)
    close(made, expected)


@settings(deadline=None)
@given(padded(math.inf), st.sampled_from([0, 1]), st.booleans())
def test_whitening_is_over_all_valid_tokens(tensors, ddof, floor):
    mask, x = tensors
    tokens = [float(v) for v, m in zip(x.flatten(), mask.flatten(), strict=True) if m]
    expected = np.zeros(mask.shape)
    if tokens and max(tokens) != min(tokens):
        mean = sum(tokens) / len(tokens)
        var = sum((v - mean) ** 2 for v in tokens) / max(len(tokens) - ddof, 1)
        scale = math.sqrt(max(var, 1e-8) if floor else var + 1e-8)
        expected[mask.numpy() == 1] = [(v - mean) / scale for v in tokens]
    made = advantages.whiten(x, mask, ddof, floor)
    torch.testing.assert_close(made, torch.from_numpy(expected), rtol=1e-7, atol=1e-7)


def test_whitening_equal_values_or_none_gives_exactly_zero():
    x = torch.full((2, 3), 0.1)
    assert not advantages.whiten(x, torch.ones(2, 3)).any()
    assert not advantages.whiten(x, torch.zeros(2, 3)).any()
    assert not advantages.whiten(x, torch.tensor([[1, 0, 0], [0, 0, 0]]), ddof=1).any()


@settings(deadline=None)
@given(padded(0.0), st.data())
def test_scalar_reward_sits_on_the_last_valid_token(tensors, data):
    mask, _ = tensors
    reward = torch.tensor(data.draw(st.lists(NUMBER, min_size=len(mask), max_size=len(mask))), dtype=torch.float64)
    made = advantages.last_token_rewards(reward, mask)
    for b in range(len(mask)):
        valid = [t for t in range(mask.shape[1]) if mask[b, t]]
        assert made[b].tolist() == [float(reward[b]) if valid and t == valid[-1] else 0.0 for t in range(mask.shape[1])]


def test_broadcast_gives_valid_tokens_the_scalar_of_their_sample():
    made = advantages.broadcast(torch.tensor([2.0, -1.0]), torch.tensor([[1, 0, 1], [0, 0, 0]]))
    assert made.tolist() == [[2, 0, 2], [0, 0, 0]]


@settings(deadline=None)
@given(padded(0.0, 0.0))
def test_row_order_only_permutes_advantages(tensors):
    mask, rewards, values = tensors
    order = torch.randperm(len(mask))
    made = advantages.gae(rewards, values, mask, 0.9, 0.8)
    again = advantages.gae(rewards[order], values[order], mask[order], 0.9, 0.8)
    for before, after in zip(made, again, strict=True):
        assert torch.equal(before[order], after)
