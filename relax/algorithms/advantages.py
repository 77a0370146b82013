"""From scalars per sample to advantages per token, and whitening over a whole rollout batch.

Tensors are right-padded [B, T]; `mask` is 1 where a token counts and may have gaps (tool output). The arithmetic is
float64, the result has the dtype of the first argument and is 0 outside the mask. Nothing outside the mask, not even
NaN, reaches a result.
"""

import torch
from torch import Tensor

from relax.algorithms.tensors import masked


def broadcast(scores: Tensor, mask: Tensor) -> Tensor:
    """Each valid token gets the scalar of its sample: scores [B], mask [B, T] -> [B, T]."""
    return masked(scores.unsqueeze(1).expand(mask.shape), mask)


def last_token_rewards(reward: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: the scalar of each sample on its last valid token, 0 elsewhere; a fully masked row is all 0."""
    valid = mask.bool()
    columns = torch.arange(valid.shape[1], device=valid.device)
    last = columns.where(valid, -1).amax(1, keepdim=True) if valid.shape[1] else columns.new_full((len(valid), 1), -1)
    return masked(reward.unsqueeze(1).expand(valid.shape), columns == last)


def reinforce_plus_plus_returns(reward: Tensor, kl: Tensor, mask: Tensor, kl_coef: float, gamma: float) -> Tensor:
    """Token returns of REINFORCE++ (arXiv:2501.03262).

    reward [B], kl [B, T] (k1 of behaviour against reference). The reward of a valid token is -kl_coef * kl, with the
    scalar added on the last valid one; the return is the sum over this and all later positions, discounted by `gamma`
    for each position in between, valid or not.
    """
    shaped = last_token_rewards(reward.double(), mask) - kl_coef * masked(kl.double(), mask)
    running = torch.zeros(shaped.shape[0], dtype=shaped.dtype, device=shaped.device)
    returns = torch.empty_like(shaped)
    for t in range(shaped.shape[1] - 1, -1, -1):
        running = shaped[:, t] + gamma * running
        returns[:, t] = running
    return masked(returns, mask).to(reward.dtype)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv:1506.02438): (advantages, returns), each [B, T].

    Steps go from a valid token to the next valid one: delta = r + gamma V' - V, with V' = 0 after the last.
    `rewards` are per token (the scalar of a sample sits on its last valid token: `last_token_rewards`).
    """
    valid = mask.bool()
    r, v = rewards.double(), values.double()
    advantages = torch.zeros_like(r)
    next_value, next_advantage = torch.zeros_like(r[:, :1]).squeeze(1), torch.zeros_like(r[:, :1]).squeeze(1)
    for t in range(r.shape[1] - 1, -1, -1):
        advantage = r[:, t] + gamma * next_value - v[:, t] + gamma * lambd * next_advantage
        next_advantage = torch.where(valid[:, t], advantage, next_advantage)
        next_value = torch.where(valid[:, t], v[:, t], next_value)
        advantages[:, t] = advantage
    advantages = masked(advantages, valid)
    returns = advantages + masked(v, valid)
    return advantages.to(rewards.dtype), returns.to(rewards.dtype)


def whiten(x: Tensor, mask: Tensor, ddof: int = 1, floor: bool = False) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the valid tokens; with `floor`, / sqrt(max(var, 1e-8)).

    `x` and `mask` have one shape, whatever it is (padded or flat), and must be the *whole* rollout batch, before it is
    cut into optimizer steps. `ddof` as in numpy's var. Equal values, a single token or none at all give exactly 0.
    """
    valid = mask.bool()
    tokens = x[valid].double()
    if len(tokens) == 0 or tokens.max() == tokens.min():
        return torch.zeros_like(x)
    mean = tokens.mean()
    var = (tokens - mean).square().sum() / max(len(tokens) - ddof, 1)
    scale = var.clamp(min=1e-8) if floor else var + 1e-8
    return masked((x.double() - mean) / scale.sqrt(), valid).to(x.dtype)
