"""KL estimators on a vocabulary small enough to enumerate: expectations are exact sums, not samples."""

import pytest
import torch

from relax.algorithms import kl, registry
from relax.algorithms.objective import Denominators, objective
from relax.algorithms.tensors import clamped_ratio
from relax.config.options import Options

VOCABULARY = 7


@pytest.fixture
def policies():
    generator = torch.Generator().manual_seed(3)
    draw = lambda: torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw().requires_grad_(), draw().log_softmax(0), draw().log_softmax(0)


def exact(logits, reference):
    logp = logits.log_softmax(0)
    return (logp.exp() * (logp - reference)).sum()


def gradient(value, logits):
    return torch.autograd.grad(value, logits)[0]


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_kl_has_the_exact_value_and_gradient_off_policy(policies, kind):
    logits, behaviour, reference = policies
    logp = logits.log_softmax(0)
    estimate = (behaviour.exp() * clamped_ratio(logp - behaviour) * kl.estimate(kind, logp, reference)).sum()
    torch.testing.assert_close(estimate, exact(logits, reference))
    torch.testing.assert_close(gradient(estimate, logits), gradient(exact(logits, reference), logits))


def test_k2_times_the_ratio_has_another_gradient(policies):
    logits, behaviour, reference = policies
    logp = logits.log_softmax(0)
    estimate = (behaviour.exp() * clamped_ratio(logp - behaviour) * kl.estimate("k2", logp, reference)).sum()
    assert (gradient(estimate, logits) - gradient(exact(logits, reference), logits)).abs().max() > 0.05


def on_policy_gradient(kind, logits, reference):
    logp = logits.log_softmax(0)
    return gradient((logp.exp().detach() * kl.estimate(kind, logp, reference)).sum(), logits)


def test_without_the_ratio_k1_pulls_nowhere_and_k3_pulls_along_the_other_direction(policies):
    logits, _, reference = policies
    assert on_policy_gradient("k1", logits, reference).abs().max() < 1e-12
    other = (reference.exp() * (reference - logits.log_softmax(0))).sum()
    torch.testing.assert_close(on_policy_gradient("k3", logits, reference), gradient(other, logits))
    torch.testing.assert_close(on_policy_gradient("k2", logits, reference), gradient(exact(logits, reference), logits))


@pytest.mark.parametrize(("kind", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_k1_and_k3_are_unbiased_values_and_k2_is_not(policies, kind, unbiased):
    logits, _, reference = policies
    logp = logits.log_softmax(0)
    error = (logp.exp() * kl.estimate(kind, logp, reference)).sum() - exact(logits, reference)
    assert (error.abs() < 1e-12) == unbiased


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_objective_follows_the_exact_kl_gradient(policies, kind):
    """One sample a word, drawn uniformly: their mean is the expectation under a uniform behaviour policy."""
    logits, _, reference = policies
    uniform = torch.full((VOCABULARY,), 1 / VOCABULARY, dtype=torch.float64).log()
    options = Options(
        use_kl_loss=True, kl_loss_coef=0.7, kl_loss_type=kind, use_unbiased_kl=True, use_rollout_logprobs=True
    )
    column = lambda x: x.unsqueeze(1)  # noqa: E731
    batch = {
        "loss_mask": torch.ones(VOCABULARY, 1),
        "behaviour_logprobs": column(uniform),
        "reference_logprobs": column(reference),
        "advantages": torch.zeros(VOCABULARY, 1, dtype=torch.float64),
        "rewards": torch.zeros(VOCABULARY, dtype=torch.float64),
    }
    current = column(logits.log_softmax(0))
    denominators = Denominators(VOCABULARY, VOCABULARY)
    made = objective(registry.get("grpo"), options, current, torch.zeros_like(current), batch, denominators)
    torch.testing.assert_close(made.loss, 0.7 * exact(logits, reference))
    torch.testing.assert_close(gradient(made.loss, logits), 0.7 * gradient(exact(logits, reference), logits))
