"""Detached weights [B, T] that multiply a token loss: for engine mismatch (TIS, IcePop) and for stale sequences.

`rollout_logp` are the behaviour log-probs, `old_logp` the proximal ones, `logp` the current ones.
"""

import torch
from torch import Tensor

from relax.algorithms.tensors import clamped_ratio, row_mean


def tis(old_logp: Tensor, rollout_logp: Tensor, clip: float = 2.0, clip_low: float = 0.0) -> Tensor:
    """Truncated importance sampling: exp(old_logp - rollout_logp) clipped to [clip_low, clip]."""
    return mismatch_ratio(old_logp, rollout_logp).clamp(clip_low, clip)


def icepop(old_logp: Tensor, rollout_logp: Tensor, low: float, high: float) -> Tensor:
    """exp(old_logp - rollout_logp) where it lies in [low, high], 0 elsewhere and where it is NaN."""
    ratio = mismatch_ratio(old_logp, rollout_logp)
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))


def sequence_mask(logp: Tensor, old_logp: Tensor, A: Tensor, mask: Tensor, delta: float) -> Tensor:
    """0 where A < 0 in a row whose masked mean of (old_logp - logp) is above `delta`, 1 elsewhere
    (off-policy sequence masking, DeepSeek-V3.2)."""
    drift = row_mean((old_logp - logp).detach(), mask)
    return 1.0 - ((A < 0) & (drift > delta)).to(drift.dtype)


def mismatch_ratio(old_logp: Tensor, rollout_logp: Tensor) -> Tensor:
    """exp(old_logp - rollout_logp) before any truncation, detached."""
    return clamped_ratio((old_logp - rollout_logp).detach())
