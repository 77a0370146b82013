"""What every loss shares: masking by selection, and importance ratios that stay finite."""

import torch
from torch import Tensor

# exp(20) = 4.9e8: far beyond every clip bound, yet its product with any advantage is finite in float32.
LOG_RATIO_LIMIT = 20.0


def masked(x: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """`x` where `mask` is non-zero, `fill` elsewhere.

    By selection and never by product, so an inf or NaN outside the mask reaches neither the value nor the gradient.
    `x` and `mask` broadcast against each other; the result has the dtype of `x`.
    """
    return torch.where(mask.bool(), x, torch.as_tensor(fill, dtype=x.dtype, device=x.device))


def clamped_ratio(log_ratio: Tensor) -> Tensor:
    """exp of `log_ratio` clamped to +-LOG_RATIO_LIMIT, in float32 at least.

    Outside the limits the gradient is 0. A NaN stays a NaN: it is a fault of the caller that must remain visible.
    """
    if log_ratio.dtype in (torch.float16, torch.bfloat16):
        log_ratio = log_ratio.float()
    # In place on the clamped copy, which nothing else holds: a loss is bound by memory, not by arithmetic.
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp_()


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row of `x` [B, T] over its valid tokens, [B, 1]; 0 for a row without any."""
    return masked(x, mask).sum(-1, keepdim=True) / mask.bool().sum(-1, keepdim=True).clamp(min=1)
