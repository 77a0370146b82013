"""M2PO's band against a plain loop that walks through its definition, and each of its cases by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from relax.algorithms import losses

EPS = 1e-12


def plain_band(logp, old, A, budget, low, high):
    """(m2_before, m2_after, eps_low, eps_high), one token after the other."""
    d2 = []
    for new, before, a in zip(logp, old, A, strict=True):
        r = math.exp(max(-20.0, min(20.0, new - before)))
        if (a > EPS and r > 1 + EPS) or (a < -EPS and r < 1 - EPS):
            d2.append((before - new) ** 2)
    n = len(d2)
    m2 = sum(d2) / n if n else 0.0
    unclipped = (1.0, 99999.0)
    if n == 0 or m2 <= budget + EPS:
        return m2, m2, *unclipped
    tau, after = 0.0, 0.0
    if budget * n > EPS:
        d2.sort()
        target, prefix = budget * n, 0.0
        for k, d in enumerate(d2):
            before, prefix = prefix, prefix + d
            if (d - EPS) * (n - k - 1) + prefix >= target - EPS:
                break
        else:
            return m2, m2, *unclipped
        if k == 0:
            after = m2
        else:
            tau, after = math.sqrt(max(d2[k - 1] - EPS, 0)), (d2[k - 1] * (n - k) + before) / n
    return m2, after, max(1 - math.exp(-tau), low), max(min(math.exp(min(tau, 700)), 1e5) - 1, high)


def solved(logp, old, A, budget, low, high):
    tensors = (torch.tensor(x, dtype=torch.float64) for x in (logp, old, A))
    scalars = losses.m2po(*tensors, kl2_budget=budget, miniclip_low=low, miniclip_high=high).scalars
    return [float(scalars[n]) for n in ("ppo_kl_m2_before", "ppo_kl_m2_after", "m2po_eps_low", "m2po_eps_high")]


TOKEN = st.tuples(
    st.one_of(st.sampled_from([0.0, 0.1, -0.1, 0.5, 30.0, -1000.0]), st.floats(-3, 3, allow_subnormal=False)),
    st.sampled_from([-2.0, -1e-13, 0.0, 1.0, 1e-13]),
)


CASE = {
    "tokens": st.lists(TOKEN, min_size=0, max_size=30),
    "budget": st.one_of(st.sampled_from([0.0, 1e-13, 0.01, 0.04, 0.0025]), st.floats(0, 2, allow_subnormal=False)),
    "floors": st.sampled_from([(0.3, 0.5), (0.0, 0.0), (0.2, 0.28)]),
}


def check_band(tokens, budget, floors):
    logp, A = [d for d, _ in tokens], [a for _, a in tokens]
    old = [0.0] * len(tokens)
    expected = plain_band(logp, old, A, budget, *floors)
    assert solved(logp, old, A, budget, *floors) == pytest.approx(list(expected), rel=1e-9, abs=1e-12)


@settings(deadline=None, max_examples=300)
@given(**CASE)
def test_band_is_the_plain_loops(tokens, budget, floors):
    check_band(tokens, budget, floors)


@pytest.mark.long
@settings(deadline=None, max_examples=5_000)
@given(**CASE)
def test_band_is_the_plain_loops_in_many_cases(tokens, budget, floors):
    check_band(tokens, budget, floors)


def test_no_harmful_token_leaves_the_ratio_free():
    assert solved([-1.0, 1.0, 5.0], [0.0] * 3, [1.0, -1.0, 0.0], 0.01, 0.3, 0.5) == [0, 0, 1, 99999]


def test_budget_that_holds_leaves_the_ratio_free():
    assert solved([0.1, 0.1], [0.0, 0.0], [1.0, 1.0], 0.01, 0.3, 0.5) == pytest.approx([0.01, 0.01, 1, 99999])


def test_budget_of_nothing_closes_the_band_to_its_floors():
    assert solved([0.1, 0.2], [0.0, 0.0], [1.0, 1.0], 0.0, 0.0, 0.0) == pytest.approx([0.025, 0, 0, 0])
    assert solved([0.1, 0.2], [0.0, 0.0], [1.0, 1.0], 0.0, 0.3, 0.5) == pytest.approx([0.025, 0, 0.3, 0.5])


def test_first_token_over_the_budget_keeps_the_uncapped_mean():
    assert solved([0.2, 0.2], [0.0, 0.0], [1.0, 1.0], 0.01, 0.0, 0.0) == pytest.approx([0.04, 0.04, 0, 0])


def test_band_ends_at_the_token_before_the_budget_breaks():
    # d2 = .01, .04, 1; capped sums .03, .09, 1.05; target .06 breaks at the second.
    before, after, low, high = solved([0.1, 0.2, 1.0], [0.0] * 3, [1.0] * 3, 0.02, 0.0, 0.0)
    assert (before, after) == pytest.approx((0.35, 0.01))
    assert (low, high) == pytest.approx((1 - math.exp(-0.1), math.exp(0.1) - 1), abs=1e-9)


def test_a_very_wide_band_is_held_at_its_limit():
    *_, low, high = solved([15.0, 30.0], [0.0, 0.0], [1.0, 1.0], 400.0, 0.0, 0.0)
    assert low == pytest.approx(1 - math.exp(-15)) and high == pytest.approx(1e5 - 1)


def test_tokens_beyond_the_band_lose_their_gradient_and_the_edge_is_exact_in_float32_too():
    logp = torch.tensor([0.1, 0.2, 1.0, -1.0], requires_grad=True)
    token = losses.m2po(logp, torch.zeros(4), torch.tensor([1.0, 1.0, 1.0, 1.0]), 0.02, 0.0, 0.0)
    (grad,) = torch.autograd.grad(token.loss.sum(), logp)
    assert token.loss.dtype == torch.float32
    # The band's edge is sqrt(d2 - 1e-12): the token that defines it lies a hair outside.
    assert (grad == 0).tolist() == [True, True, True, False]


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(tokens):
    generator = torch.Generator().manual_seed(0)
    logp = torch.randn(tokens, generator=generator)
    with Operations() as seen:
        losses.m2po(logp, torch.zeros(tokens), torch.ones(tokens), 0.01)
    return seen.count


def test_number_of_operations_does_not_depend_on_the_number_of_tokens():
    assert operations(16) == operations(20_000) < 120
