"""What each loss does at its edges: extreme ratios, masked rubbish, empty batches, ties."""

import math

import pytest
import torch

from relax.algorithms import corrections, kl, losses, reduce
from relax.algorithms.tensors import masked

NAMES = ("ppo_clip", "gspo", "cispo", "sapo", "m2po", "rloo")


def call(name, logp, old, A, mask):
    return getattr(losses, name)(*{"rloo": (logp, A), "gspo": (logp, old, A, mask)}.get(name, (logp, old, A)))


def batch(seed=0, rows=4, columns=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(rows, columns, generator=generator, dtype=dtype)  # noqa: E731
    mask = torch.arange(columns) < torch.randint(0, columns + 1, (rows, 1), generator=generator)
    logp = -draw().abs()
    return logp, logp + 0.3 * draw(), draw(), mask


def gradient(name, logp, old, A, mask, reduction=reduce.per_sample):
    logp = logp.clone().requires_grad_()
    inside = (masked(x, mask) for x in (logp, old, A))
    total = reduction(call(name, *inside, mask).loss, mask)
    return total.detach(), torch.autograd.grad(total, logp)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("distance", [1000.0, -1000.0])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_log_ratios_have_finite_value_and_gradient(name, distance, dtype):
    logp, _, A, _ = batch(dtype=torch.float64)
    logp, A = logp.to(dtype), A.to(dtype)
    mask = torch.ones_like(logp, dtype=torch.bool)
    value, grad = gradient(name, logp, logp - distance, A, mask)
    assert value.isfinite() and grad.isfinite().all()


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_outside_the_mask_reaches_value_or_gradient(name, rubbish):
    logp, old, A, mask = batch()
    clean = gradient(name, logp, old, A, mask)
    dirty = gradient(name, *(torch.where(mask, x, rubbish) for x in (logp, old, A)), mask)
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])
    assert not dirty[1][~mask].any()


@pytest.mark.parametrize("reduction", [reduce.per_token, reduce.per_sample])
@pytest.mark.parametrize("name", NAMES)
def test_all_masked_batch_is_zero_with_finite_gradient(name, reduction):
    logp, old, A, mask = batch()
    value, grad = gradient(name, logp * math.nan, old, A, torch.zeros_like(mask), reduction)
    assert value == 0 and not grad.any()


@pytest.mark.parametrize("name", NAMES)
def test_nan_inside_the_mask_stays_visible(name):
    logp, old, A, _ = batch()
    logp[1, 2] = math.nan
    token = call(name, logp, old, A, torch.ones_like(logp))
    assert token.loss[1, 2].isnan()


@pytest.mark.parametrize("name", NAMES)
def test_permuting_rows_permutes_results(name):
    logp, old, A, mask = batch()
    order = torch.tensor([2, 0, 3, 1])
    token = call(name, logp, old, A, mask)
    again = call(name, logp[order], old[order], A[order], mask[order])
    torch.testing.assert_close(again.loss, token.loss[order])
    assert torch.equal(again.clipped, token.clipped[order])


@pytest.mark.parametrize("name", NAMES)
def test_at_ratio_one_the_gradient_is_minus_the_advantage(name):
    logp, _, A, _ = batch()
    A = A[:, :1].expand_as(A)
    mask = torch.ones_like(logp)
    logp.requires_grad_()
    token = call(name, logp, logp.detach(), A, mask)
    (grad,) = torch.autograd.grad(token.loss.sum(), logp)
    torch.testing.assert_close(grad, -A)
    assert not token.clipped.any()


def test_ppo_clip_bounds_are_independent():
    old = torch.zeros(4)
    logp = torch.log(torch.tensor([1.25, 1.35, 0.85, 0.75]))
    token = losses.ppo_clip(logp, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), eps_clip=0.2, eps_clip_high=0.3)
    torch.testing.assert_close(token.loss, torch.tensor([-1.25, -1.3, 0.85, 0.8]))
    assert token.clipped.tolist() == [0, 1, 0, 1]


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    logp = torch.log(torch.tensor([10.0, 10.0, 2.0]))
    A = torch.tensor([-1.0, 1.0, -1.0])
    token = losses.ppo_clip(logp, torch.zeros(3), A, eps_clip_c=3.0)
    torch.testing.assert_close(token.loss, torch.tensor([3.0, -1.2, 2.0]))


@pytest.mark.parametrize("bound", [1.0, 0.5, -2.0])
def test_dual_clip_bound_must_exceed_one(bound):
    with pytest.raises(ValueError, match="above 1"):
        losses.ppo_clip(torch.zeros(2), torch.zeros(2), torch.zeros(2), eps_clip_c=bound)


def test_gspo_compares_whole_sequences():
    logp = torch.tensor([[0.0, 0.4, 9.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    token = losses.gspo(logp, torch.zeros_like(logp), torch.ones_like(logp), mask, eps_clip_high=0.5)
    torch.testing.assert_close(token.loss[0], torch.full((3,), -math.exp(0.2), dtype=torch.float64))
    assert token.loss[1].tolist() == [-1, -1, -1]


def test_clipped_cispo_token_keeps_its_gradient_and_both_sides_are_clipped():
    logp = torch.log(torch.tensor([5.0, 0.1])).requires_grad_()
    token = losses.cispo(logp, torch.zeros(2), torch.tensor([-1.0, 1.0]))
    token.loss.sum().backward()
    torch.testing.assert_close(logp.grad, torch.tensor([1.2, -0.8]))
    assert token.clipped.tolist() == [1, 1]


def test_sapo_temperature_follows_the_sign_of_the_advantage():
    logp = torch.log(torch.tensor([1.5, 1.5, 1.5]))
    token = losses.sapo(logp, torch.zeros(3), torch.tensor([1.0, -1.0, 0.0]), tau_pos=2.0, tau_neg=3.0)
    expected = [-4 / 2 / (1 + math.exp(-2 * 0.5)), 4 / 3 / (1 + math.exp(-3 * 0.5)), 0.0]
    torch.testing.assert_close(token.loss, torch.tensor(expected))


def test_value_loss_takes_the_larger_error():
    token = losses.value(torch.tensor([1.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), value_clip=0.2)
    torch.testing.assert_close(token.loss, torch.tensor([0.64, 0.81]))
    assert token.clipped.tolist() == [1, 0]


def test_icepop_rejects_by_selection():
    old = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0])
    rollout = torch.tensor([0.0, 1000.0, -1000.0, math.nan, -math.inf])
    weights = corrections.icepop(old, rollout, 0.5, 2.0)
    assert weights.tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("distance", [1000.0, -1000.0])
def test_corrections_of_extreme_mismatch_are_finite_and_detached(distance):
    old = torch.zeros(3, requires_grad=True)
    for weights in (corrections.tis(old, old.detach() - distance), corrections.icepop(old, old - distance, 0, 2)):
        assert weights.isfinite().all() and not weights.requires_grad


def test_sequence_mask_drops_negative_tokens_of_drifted_sequences_only():
    old = torch.zeros(3, 3)
    logp = torch.tensor([[-1.0, -1.0, 9.0], [-1.0, 1.0, 9.0], [-1.0, -1.0, 9.0]])
    A = torch.tensor([[-1.0, 1.0, -1.0], [-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 0]]).expand(3, 3)
    kept = corrections.sequence_mask(logp.requires_grad_(), old, A, mask, delta=0.5)
    assert kept.tolist() == [[0, 1, 0], [1, 1, 1], [1, 1, 1]]
    assert not kept.requires_grad


@pytest.mark.parametrize("kind", kl.KINDS)
@pytest.mark.parametrize("distance", [1000.0, -1000.0])
def test_kl_of_distant_policies_has_finite_value_and_gradient(kind, distance):
    logp = torch.full((3,), distance, requires_grad=True)
    estimate = kl.estimate(kind, logp, torch.zeros(3))
    estimate.sum().backward()
    assert estimate.isfinite().all() and logp.grad.isfinite().all()


def test_low_var_kl_is_held_at_ten():
    assert kl.estimate("low_var_kl", torch.tensor([-15.0]), torch.zeros(1)).tolist() == [10.0]


def test_unknown_kl_estimator_is_refused():
    with pytest.raises(ValueError, match="'k4': one of k1, k2, k3, low_var_kl"):
        kl.estimate("k4", torch.zeros(1), torch.zeros(1))


def test_reductions_of_parts_over_one_denominator_add_up():
    x, mask = torch.randn(6, 5).double(), torch.rand(6, 5) < 0.5
    tokens = int(mask.sum())
    halves = [(x[:2], mask[:2]), (x[2:], mask[2:])]
    whole = reduce.per_token(x, mask)
    torch.testing.assert_close(sum(reduce.per_token(*half, tokens=tokens) for half in halves), whole)
    torch.testing.assert_close(sum(reduce.per_sample(*half, samples=6) for half in halves), reduce.per_sample(x, mask))


def test_empty_response_counts_in_the_per_sample_mean():
    x, mask = torch.tensor([[2.0, 4.0], [9.0, 9.0]]), torch.tensor([[1, 1], [0, 0]])
    assert reduce.per_sample(x, mask) == 1.5
    assert reduce.per_token(x, mask) == 3.0
