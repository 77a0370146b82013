"""The registry's table, and that a new algorithm is one entry plus its pure functions."""

import numpy as np
import pytest
import torch

from relax.algorithms import contracts, registry, signal
from relax.algorithms.losses import TokenLoss
from relax.algorithms.objective import Denominators, objective
from relax.algorithms.registry import AlgorithmSpec, Function
from relax.config.options import Options
from relax.functions import load

TABLE = {
    "grpo": ("group_mean_std", "broadcast", "ppo_clip", "token", set()),
    "gspo": ("group_mean_std", "broadcast", "gspo", "sequence", set()),
    "cispo": ("group_mean_std", "broadcast", "cispo", "token", set()),
    "sapo": ("group_mean_std", "broadcast", "sapo", "token", set()),
    "m2po": ("raw", "broadcast", "m2po", "token", set()),
    "rloo": ("leave_one_out", "broadcast", "rloo", None, set()),
    "ppo": ("raw", "gae", "ppo_clip", "token", {"critic"}),
    "reinforce_plus_plus": ("raw", "reinforce_plus_plus_returns", "ppo_clip", "token", {"reference"}),
    "reinforce_plus_plus_baseline": ("group_mean", "broadcast", "ppo_clip", "token", set()),
}


def test_registry_holds_the_nine_algorithms_as_specified():
    seen = {}
    for name in registry.names():
        spec = registry.get(name)
        functions = (load(f.path).__name__ for f in (spec.normalizer, spec.advantage, spec.loss))
        seen[name] = (*functions, spec.ratio, set(spec.needs))
    assert seen == TABLE


@pytest.mark.parametrize("name", TABLE)
def test_every_option_that_an_algorithm_reads_exists(name):
    assert registry.get(name).option_names <= set(Options.model_fields)


def test_options_reach_the_functions_parameters():
    logp, A = torch.tensor([[1.0]]), torch.tensor([[1.0]])
    inputs = {"logp": logp, "old_logp": torch.zeros_like(logp), "A": A, "mask": torch.ones_like(A)}
    assert registry.get("grpo").loss(inputs, Options(eps_clip_high=0.4)).loss == -1.4
    assert registry.get("m2po").loss(inputs, Options(m2po_miniclip_high=0.6)).loss == pytest.approx(-1.6)
    sapo = registry.get("sapo").loss(inputs, Options(sapo_tau_pos=2.0)).loss
    torch.testing.assert_close(sapo, -2 * torch.sigmoid(2 * (logp.exp() - 1)))


def test_name_is_registered_once():
    with pytest.raises(ValueError, match="'grpo' is registered already"):
        registry.register(registry.get("grpo"))


def best_minus_mean(rewards):
    return torch.where(rewards == rewards.max(), rewards - rewards.mean(), torch.zeros_like(rewards))


def squared(logp, old_logp, A, eps_clip):
    return TokenLoss(A * (logp - old_logp).square() * eps_clip, torch.zeros_like(logp))


def test_a_new_algorithm_is_one_entry_and_its_functions(monkeypatch):
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    registry.register(
        AlgorithmSpec(
            "mine",
            normalizer=Function(f"{__name__}:best_minus_mean", ("rewards",)),
            advantage=registry.BROADCAST,
            loss=Function(f"{__name__}:squared", ("logp", "old_logp", "A"), {"eps_clip": "eps_clip"}),
            ratio="token",
        )
    )
    options = Options(eps_clip=0.5, use_rollout_logprobs=True)
    spec = registry.get("mine")
    lens, mask = np.array([1, 1], np.int32), np.ones(2, np.uint8)
    made = signal.batch_advantages(spec, options, np.array([1.0, 0.0]), np.array([0, 0]), lens, mask)
    assert made.advantages.tolist() == [0.5, 0]
    current = torch.tensor([[2.0], [0.0]])
    batch = {
        "loss_mask": torch.ones(2, 1),
        "behaviour_logprobs": torch.zeros(2, 1),
        "advantages": torch.from_numpy(made.advantages)[:, None],
        "rewards": torch.tensor([1.0, 0.0]),
    }
    assert objective(spec, options, current, current, batch, Denominators(2, 2)).loss == 0.5 * 4 * 0.5 / 2
    assert {v.option for v in contracts.violations(Options(eps_clip_c=3.0, gamma=0.5))} == {"--gamma"}
