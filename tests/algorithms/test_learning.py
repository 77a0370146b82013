"""Each algorithm, from rewards to optimizer steps, on a policy of a few logits: it must learn what pays."""

import numpy as np
import pytest
import torch

from relax.algorithms import contracts, registry, signal
from relax.algorithms.objective import Denominators, objective, value_objective
from relax.algorithms.proximal import proximal_source
from relax.config.options import Options

GROUPS, SAMPLES, LENGTH, WORDS = 8, 4, 3, 5
WANTED = torch.tensor([1, 4, 2])

OPTIONS = {
    "grpo": {},
    "gspo": {"num_steps_per_rollout": 2},
    "cispo": {"use_tis": True},
    "sapo": {},
    "m2po": {"use_rollout_logprobs": True},
    "rloo": {"calculate_per_token_loss": True},
    "ppo": {"lambd": 0.9, "gamma": 1.0},
    "reinforce_plus_plus": {"normalize_advantages": True, "kl_coef": 0.01, "ref_load": "ref"},
    "reinforce_plus_plus_baseline": {
        "normalize_advantages": True,
        "use_kl_loss": True,
        "kl_loss_type": "k2",
        "kl_loss_coef": 0.01,
        "ref_load": "ref",
    },
}


def draw(policy, generator):
    """Samples words [N, T]; reward is the share of positions that hold the wanted word."""
    probabilities = policy.detach().softmax(-1)
    words = torch.multinomial(probabilities, GROUPS * SAMPLES, replacement=True, generator=generator).T
    return words, (words == WANTED).double().mean(1)


def logprobs(logits, words):
    return logits.log_softmax(-1).expand(len(words), -1, -1).gather(2, words.unsqueeze(2)).squeeze(2)


def train(name, seed, batches=25):
    """Mean reward of the first and of the last batches."""
    options = Options(
        advantage_estimator=name, rollout_batch_size=GROUPS, n_samples_per_prompt=SAMPLES, **OPTIONS[name]
    )
    assert contracts.violations(options) == []
    spec, source = registry.get(name), proximal_source(registry.get(name), options)
    generator = torch.Generator().manual_seed(seed)
    policy = torch.zeros(LENGTH, WORDS, requires_grad=True)
    critic = torch.zeros(LENGTH, requires_grad=True)
    optimizer, tuner = torch.optim.Adam([policy], lr=0.2), torch.optim.Adam([critic], lr=0.05)
    reference, rewards = policy.detach().clone(), []
    lens = np.full(GROUPS * SAMPLES, LENGTH, np.int32)
    mask = np.ones(lens.sum(), np.uint8)
    ids = np.repeat(np.arange(GROUPS), SAMPLES)
    for _ in range(batches):
        words, paid = draw(policy, generator)
        rewards.append(float(paid.mean()))
        behaviour = logprobs(policy.detach(), words)
        fixed = logprobs(reference, words)
        made = signal.batch_advantages(
            spec,
            options,
            paid.numpy(),
            ids,
            lens,
            mask,
            behaviour_logprobs=behaviour.flatten().numpy(),
            reference_logprobs=fixed.flatten().numpy(),
            values=critic.detach().repeat(len(words)).numpy(),
        )
        batch = {
            "loss_mask": torch.ones_like(words),
            "behaviour_logprobs": behaviour,
            "reference_logprobs": fixed,
            "advantages": torch.from_numpy(made.advantages).view(words.shape),
            "rewards": paid,
        }
        if source == "recomputed":
            batch["proximal_logprobs"] = behaviour
        if made.returns is not None:
            batch["values"] = critic.detach().repeat(len(words), 1)
            batch["returns"] = torch.from_numpy(made.returns).view(words.shape)
        for rows in torch.arange(len(words)).chunk(options.num_steps_per_rollout):
            part = {key: x[rows] for key, x in batch.items()}
            over = Denominators.of(part["loss_mask"].numpy(), part["rewards"].numpy())
            current = logprobs(policy, words[rows])
            entropy = -(policy.softmax(-1) * policy.log_softmax(-1)).sum(-1).expand(len(rows), -1)
            optimizer.zero_grad()
            objective(spec, options, current, entropy, part, over).loss.backward()
            optimizer.step()
            if made.returns is not None:
                tuner.zero_grad()
                value_objective(options, critic.expand(len(rows), -1), part, over).loss.backward()
                tuner.step()
    return np.mean(rewards[:3]), np.mean(rewards[-3:])


@pytest.mark.parametrize("name", registry.names())
def test_mean_reward_rises(name):
    first, last = train(name, seed=0)
    assert first < 0.35 and last > 0.8
