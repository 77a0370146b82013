"""Log-prob and entropy from logits: values, gradients, padding of the vocabulary, extremes."""

import math

import pytest
import torch

from relax.megatron.logprobs import logprob_entropy


def reference(logits, targets, temperature):
    logp = (logits.float() / temperature).log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def random_logits(n=6, vocab=11, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, vocab, generator=generator) * scale
    return logits.requires_grad_(), torch.randint(0, vocab, (n,), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_values_and_gradients_equal_log_softmax(temperature):
    logits, targets = random_logits()
    weights = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    results = []
    for logp, entropy in (
        logprob_entropy(logits, targets, vocab=11, temperature=temperature),
        reference(logits, targets, temperature),
    ):
        (grad,) = torch.autograd.grad((logp * weights[0] + entropy * weights[1]).sum(), logits)
        results.append((logp, entropy, grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_entropy_alone_has_its_gradient():
    logits, targets = random_logits()
    (got,) = torch.autograd.grad(logprob_entropy(logits, targets, vocab=11)[1].sum(), logits)
    (want,) = torch.autograd.grad(reference(logits, targets, 1.0)[1].sum(), logits)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_padding_of_the_vocabulary_has_no_probability_and_no_gradient():
    logits, targets = random_logits(vocab=8)
    padded = torch.cat([logits.detach(), torch.full((6, 3), 50.0)], 1).requires_grad_()
    got = logprob_entropy(padded, targets, vocab=8)
    for value, want in zip(got, reference(logits, targets, 1.0), strict=True):
        torch.testing.assert_close(value, want, atol=1e-6, rtol=1e-5)
    (grad,) = torch.autograd.grad((got[0] + got[1]).sum(), padded)
    assert (grad[:, 8:] == 0).all()
    assert grad.isfinite().all()


def test_logits_stay_as_they_were():
    logits, targets = random_logits()
    before = logits.detach().clone()
    sum(logprob_entropy(logits, targets, vocab=11)).sum().backward()
    assert torch.equal(logits.detach(), before)


def test_extreme_logits_give_finite_entropy_and_gradients():
    logits = torch.tensor([[1e4, -1e4, -math.inf, 0.0], [5.0, 5.0, 5.0, 5.0]], requires_grad=True)
    logp, entropy = logprob_entropy(logits, torch.tensor([0, 3]), vocab=4)
    assert logp.tolist() == pytest.approx([0.0, -math.log(4)])
    assert entropy.tolist() == pytest.approx([0.0, math.log(4)])
    (grad,) = torch.autograd.grad((logp + entropy).sum(), logits)
    assert grad.isfinite().all()


def test_a_nan_logit_stays_visible():
    logp, entropy = logprob_entropy(torch.tensor([[0.0, math.nan]]), torch.tensor([0]), vocab=2)
    assert logp.isnan().all()
    assert entropy.isnan().all()


def test_no_token_gives_no_value_and_a_zero_gradient():
    logits = torch.zeros(0, 5, requires_grad=True)
    logp, _ = logprob_entropy(logits, torch.zeros(0, dtype=torch.int64), vocab=5)
    logp.sum().backward()
    assert logits.grad.shape == (0, 5)


def test_bfloat16_logits_are_computed_in_float32():
    logits, targets = random_logits()
    half = logits.detach().bfloat16().requires_grad_()
    logp, _ = logprob_entropy(half, targets, vocab=11, temperature=0.7)
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp, reference(half.float(), targets, 0.7)[0], atol=1e-6, rtol=1e-5)
    logp.sum().backward()
    assert half.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature is"):
        logprob_entropy(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), vocab=2, temperature=temperature)
