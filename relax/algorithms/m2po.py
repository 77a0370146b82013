"""The clip band of M2PO: how far the ratio may go before the harmful tokens exceed their second-moment budget.

Among the harmful tokens (those the update would push further from the old policy: A > 0 and r > 1, or A < 0 and r < 1)
let d2 be the squared log-ratio. If mean(d2) is over the budget, the band is cut at +-tau in log space, where tau is the
largest log-ratio that occurs among them such that the mean of min(d2, tau^2) stays under the budget.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_EPS = 1e-12
_MAX_RATIO = 1e5
_UNCLIPPED = (1.0, _MAX_RATIO - 1.0)


@dataclass(frozen=True, slots=True)
class Band:
    """Ratios within [1 - eps_low, 1 + eps_high] are free. All four are 0-d float64 tensors on the input's device;
    `m2_after` is what the solver reached, before the floors widen the band."""

    m2_before: Tensor
    m2_after: Tensor
    eps_low: Tensor
    eps_high: Tensor


def solve_band(
    log_ratio: Tensor, ratio: Tensor, A: Tensor, kl2_budget: float, miniclip_low: float, miniclip_high: float
) -> Band:
    """The band for these tokens (float64 tensors of one shape, detached).

    A token with A = 0, or with ratio exactly 1, is never harmful, so positions that were masked beforehand do not
    count. O(n log n) on the device in the n harmful tokens, O(N) when the budget holds, which is the usual case; one
    transfer to the host.
    """
    harmful = ((A > _EPS) & (ratio > 1 + _EPS)) | ((A < -_EPS) & (ratio < 1 - _EPS))
    squared = log_ratio.square()
    total, count = torch.stack([squared.where(harmful, 0.0).sum(), harmful.sum().double()]).tolist()
    n = int(count)
    m2 = total / n if n else 0.0
    if m2 <= kl2_budget + _EPS:
        return _band(squared, m2, m2, *_UNCLIPPED)
    if kl2_budget * n <= _EPS:
        return _band(squared, m2, 0.0, max(0.0, miniclip_low), max(0.0, miniclip_high))

    # nonzero_static: the size is known by now, so that picking the tokens needs no second transfer.
    index = torch.nonzero_static(harmful.flatten(), size=n).squeeze(1)
    d2 = squared.flatten()[index].sort().values
    prefix = d2.cumsum(0)
    above = torch.arange(n - 1, -1, -1, device=d2.device, dtype=d2.dtype)
    # Sum over all n tokens when each is capped at its k-th smallest; rises with k.
    capped = (d2 - _EPS) * above + prefix
    k = torch.searchsorted(capped, kl2_budget * n - _EPS)

    previous = (k - 1).clamp(min=0)
    tau = (d2[previous] - _EPS).clamp(min=0).sqrt()
    after = (d2[previous] * (n - k) + prefix[previous]) / n
    over_at_once, never_over = k == 0, k == n
    tau = tau.where(~over_at_once, 0.0)
    after = after.where(~(over_at_once | never_over), m2)
    eps_low = (1 - (-tau).exp()).clamp(min=miniclip_low).where(~never_over, _UNCLIPPED[0])
    eps_high = (tau.exp().clamp(max=_MAX_RATIO) - 1).clamp(min=miniclip_high).where(~never_over, _UNCLIPPED[1])
    return Band(after.new_tensor(m2), after, eps_low, eps_high)


def _band(like: Tensor, before: float, after: float, eps_low: float, eps_high: float) -> Band:
    return Band(*like.new_tensor([before, after, eps_low, eps_high]).unbind())
