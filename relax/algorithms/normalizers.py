"""From the rewards of one group to one scalar per sample.

Each function takes the rewards of the scored samples of a single group, as a vector [G] (tensor, array or list), and
returns a tensor [G] of the same floating dtype (float64 for lists and integers). The arithmetic is float64. A group
whose rewards are all equal carries no signal and gets exactly 0, whatever rounding would have left.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Rewards = Tensor | np.ndarray | Sequence[float]


def group_mean_std(rewards: Rewards, use_std: bool = True) -> Tensor:
    """(r - mean) / (std + 1e-6) with Bessel's std (GRPO); without the division when `use_std` is False (Dr.GRPO)."""
    r, dtype = _vector(rewards, minimum=1, of="group_mean_std")
    centred = _centred(r)
    if use_std and len(r) > 1:
        centred = centred / (r.std() + 1e-6)
    return centred.to(dtype)


def group_mean(rewards: Rewards) -> Tensor:
    """r - mean (REINFORCE++-baseline)."""
    r, dtype = _vector(rewards, minimum=1, of="group_mean")
    return _centred(r).to(dtype)


def leave_one_out(rewards: Rewards) -> Tensor:
    """r minus the mean of the *other* rewards, which is G/(G-1) (r - mean) (RLOO). Raises ValueError for G < 2."""
    r, dtype = _vector(rewards, minimum=2, of="leave_one_out")
    return (_centred(r) * (len(r) / (len(r) - 1))).to(dtype)


def raw(rewards: Rewards) -> Tensor:
    """The rewards themselves: for estimators that take them as they are, and `--disable-rewards-normalization`."""
    r, dtype = _vector(rewards, minimum=1, of="raw")
    return r.to(dtype)


def _vector(rewards: Rewards, minimum: int, of: str) -> tuple[Tensor, torch.dtype]:
    # A Python list would become float32 through torch; numpy keeps its float64.
    r = rewards if isinstance(rewards, Tensor) else torch.from_numpy(np.array(rewards, dtype=np.float64))
    dtype = r.dtype if r.is_floating_point() else torch.float64
    if r.dim() != 1:
        raise ValueError(f"{of} takes the rewards of one group as a vector, got shape {tuple(r.shape)}")
    if len(r) < minimum:
        raise ValueError(f"{of} needs at least {minimum} scored sample(s) in a group, got {len(r)}")
    bad = (~torch.isfinite(r)).nonzero().flatten()
    if len(bad):
        position = int(bad[0])
        raise ValueError(f"{of}: reward at position {position} of {len(r)} is {float(r[position])}, it must be finite")
    return r.double(), dtype


def _centred(r: Tensor) -> Tensor:
    return torch.zeros_like(r) if r.max() == r.min() else r - r.mean()
