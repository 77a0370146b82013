"""Per-token policy and value losses.

Every function takes right-padded tensors [B, T] and returns a `TokenLoss` of per-token values. None of them masks or
reduces: the caller passes each tensor through `tensors.masked` first and reduces once, through `reduce`. `logp` are the
current log-probs, `old_logp` the proximal ones (constants), `A` the advantages (constants). r = exp(logp - old_logp),
its logarithm clamped to +-20.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from relax.algorithms.m2po import solve_band
from relax.algorithms.tensors import clamped_ratio, row_mean


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """`loss` [B, T] before any weight, `clipped` [B, T] 1 where the clip replaced the token's own term, and scalars
    (0-d tensors, by metric name) that hold for the whole micro-batch."""

    loss: Tensor
    clipped: Tensor
    scalars: dict[str, Tensor] = field(default_factory=dict)


def ppo_clip(
    logp: Tensor,
    old_logp: Tensor,
    A: Tensor,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> TokenLoss:
    """max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A) (PPO, arXiv:1707.06347; unequal bounds: DAPO).

    `eps_clip_high` defaults to `eps_clip`. `eps_clip_c` > 1 adds the dual clip, min(., -eps_clip_c A) where A < 0
    (arXiv:1912.09729). Raises ValueError for `eps_clip_c` <= 1.
    """
    return _clip(clamped_ratio(logp - old_logp), A, eps_clip, _high(eps_clip, eps_clip_high), eps_clip_c)


def gspo(
    logp: Tensor, old_logp: Tensor, A: Tensor, mask: Tensor, eps_clip: float = 0.2, eps_clip_high: float | None = None
) -> TokenLoss:
    """ppo_clip on the sequence ratio exp(mean over valid tokens of (logp - old_logp)) (GSPO, arXiv:2507.18071).

    Every token of a row carries the row's ratio. A row without valid tokens has ratio 1.
    """
    ratio = clamped_ratio(-row_mean(old_logp - logp, mask)).expand_as(logp)
    return _clip(ratio, A, eps_clip, _high(eps_clip, eps_clip_high), None)


def cispo(
    logp: Tensor, old_logp: Tensor, A: Tensor, eps_clip: float = 0.2, eps_clip_high: float | None = None
) -> TokenLoss:
    """-sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) sg(A) logp (CISPO, arXiv:2506.13585).

    Both sides are clipped for every token, and a clipped token keeps its gradient.
    """
    with torch.no_grad():
        ratio = clamped_ratio(logp - old_logp)
        weight = ratio.clamp(1 - eps_clip, 1 + _high(eps_clip, eps_clip_high))
        clipped = ratio.ne_(weight).to(logp.dtype)
        weight.mul_(A).neg_()
    return TokenLoss(weight * logp, clipped)


def sapo(logp: Tensor, old_logp: Tensor, A: Tensor, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A, with `tau_pos` where A > 0 and `tau_neg` elsewhere (SAPO, arXiv:2511.20347).

    At r = 1 the gradient is -A whatever tau is. Nothing is clipped.
    """
    ratio = clamped_ratio(logp - old_logp)
    tau = torch.where(A > 0, ratio.new_tensor(tau_pos), ratio.new_tensor(tau_neg))
    loss = (ratio - 1.0).mul_(tau).sigmoid_() * (A / tau).mul_(-4)
    return TokenLoss(loss, torch.zeros_like(loss))


def m2po(
    logp: Tensor,
    old_logp: Tensor,
    A: Tensor,
    kl2_budget: float = 0.01,
    miniclip_low: float = 0.3,
    miniclip_high: float = 0.5,
) -> TokenLoss:
    """ppo_clip with the band that holds the second moment of the harmful log-ratios at `kl2_budget`
    (M2PO, arXiv:2510.01161), never narrower than [1 - miniclip_low, 1 + miniclip_high].

    The band belongs to the tokens handed in, so it depends on the micro-batch. Solver, ratio and clip are float64: the
    band's edge lies exactly on a token's ratio. Scalars: `ppo_kl_m2_before`, `ppo_kl_m2_after`, `m2po_eps_low`,
    `m2po_eps_high`.
    """
    log_ratio = logp.double() - old_logp.double()
    ratio = clamped_ratio(log_ratio)
    band = solve_band(log_ratio.detach(), ratio.detach(), A.double(), kl2_budget, miniclip_low, miniclip_high)
    token = _clip(ratio, A.double(), band.eps_low, band.eps_high, None)
    scalars = {
        "ppo_kl_m2_before": band.m2_before,
        "ppo_kl_m2_after": band.m2_after,
        "m2po_eps_low": band.eps_low,
        "m2po_eps_high": band.eps_high,
    }
    return TokenLoss(token.loss.to(logp.dtype), token.clipped.to(logp.dtype), scalars)


def rloo(logp: Tensor, A: Tensor) -> TokenLoss:
    """-sg(A) logp: plain REINFORCE on the leave-one-out advantage (arXiv:2402.14740). Nothing is clipped."""
    return TokenLoss(-A.detach() * logp, torch.zeros_like(logp))


def value(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float = 0.2) -> TokenLoss:
    """max of the squared errors of `values` and of `values` kept within `value_clip` of `old_values`; no factor 1/2.

    `old_values` are those that the advantages were made from. `clipped` marks where the clipped error is the larger.
    """
    kept = old_values + (values - old_values).clamp(-value_clip, value_clip)
    clipped_error, error = (kept - returns).square(), (values - returns).square()
    return TokenLoss(torch.maximum(clipped_error, error), (clipped_error > error).to(values.dtype))


def _high(eps_clip: float, eps_clip_high: float | None) -> float:
    return eps_clip if eps_clip_high is None else eps_clip_high


def _clip(
    ratio: Tensor, A: Tensor, eps_low: float | Tensor, eps_high: float | Tensor, eps_c: float | None
) -> TokenLoss:
    penalty = -A
    loss = ratio * penalty
    # A clipped token has no gradient: its ratio lies outside the bounds. So the clipped branch needs no graph, which
    # halves the time of the backward pass. The bounds may be 0-d tensors on the device (M2PO).
    with torch.no_grad():
        bounded = ratio.clamp(1 - eps_low, 1 + eps_high) * penalty  # type: ignore[arg-type]
        clipped = bounded > loss
    loss = torch.where(clipped, bounded, loss)
    if eps_c is not None:
        if eps_c <= 1:
            raise ValueError(f"eps_clip_c = {eps_c}: the dual clip needs a bound above 1")
        loss = torch.where(A < 0, torch.minimum(loss, eps_c * penalty), loss)
    return TokenLoss(loss, clipped.to(loss.dtype))
