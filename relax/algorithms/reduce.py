"""The two ways from per-token values [B, T] to one number, masked by selection.

The denominators are those of the *global optimizer batch*: pass them whenever `x` is only a part of it (a micro-batch,
a data-parallel share). Without them `x` is taken to be the whole. Sums of parts over one denominator add up to the
whole, which is why neither reduction depends on how a batch was cut. Denominators are floored at 1, so an all-masked
batch gives 0 with gradients that exist and are 0.
"""

from torch import Tensor

from relax.algorithms.tensors import masked, row_mean


def per_token(x: Tensor, mask: Tensor, tokens: int | Tensor | None = None) -> Tensor:
    """Sum of the valid tokens of `x` / `tokens`, the valid tokens of the optimizer batch."""
    return token_sum(x, mask) / _floored(mask.bool().sum() if tokens is None else tokens)


def per_sample(x: Tensor, mask: Tensor, samples: int | Tensor | None = None) -> Tensor:
    """Sum over rows of the row's mean over its valid tokens / `samples`, the scored samples of the optimizer batch.

    A row without valid tokens adds 0 and still counts.
    """
    return sample_sum(x, mask) / _floored(x.shape[0] if samples is None else samples)


def token_sum(x: Tensor, mask: Tensor) -> Tensor:
    """The numerator of `per_token`, a 0-d tensor."""
    return masked(x, mask).sum()


def sample_sum(x: Tensor, mask: Tensor) -> Tensor:
    """The numerator of `per_sample`, a 0-d tensor."""
    return row_mean(x, mask).sum()


def _floored(denominator: int | Tensor) -> int | Tensor:
    return denominator.clamp(min=1) if isinstance(denominator, Tensor) else max(denominator, 1)
