"""Per-token estimators of KL(current || reference), from samples (http://joschu.net/blog/kl-approx.html).

As *values* they are right when the tokens were sampled by the current policy: k1 and k3 are unbiased, k2 is not. As
*losses* differentiated through fixed samples they are another matter. On policy, the gradient of k1 has expectation 0,
that of k3 is the gradient of KL(reference || current), and only k2's is that of the KL. Multiplied by the importance
ratio, not detached (`--use-unbiased-kl`), k1 and k3 have its exact gradient, off policy too, provided that the ratio's
denominator is the policy which sampled; k2 loses it.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from relax.algorithms.tensors import LOG_RATIO_LIMIT

Kind = Literal["k1", "k2", "k3", "low_var_kl"]
KINDS: tuple[str, ...] = get_args(Kind)
_LOW_VAR_LIMIT = 10.0


def estimate(kind: str, logp: Tensor, ref_logp: Tensor) -> Tensor:
    """With d = logp - ref_logp: k1 = d, k2 = d*d/2, k3 = exp(-d) - 1 + d, low_var_kl = k3 clamped to +-10.

    Same shape as the inputs. k3 grows as exp(-d); its d is held at -20 from below, where value and gradient stop.
    Raises ValueError for an unknown kind.
    """
    d = logp - ref_logp
    match kind:
        case "k1":
            return d
        case "k2":
            return d * d / 2
        case "k3":
            return _k3(d)
        case "low_var_kl":
            return _k3(d).clamp(-_LOW_VAR_LIMIT, _LOW_VAR_LIMIT)
    raise ValueError(f"unknown KL estimator {kind!r}: one of {', '.join(KINDS)}")


def _k3(d: Tensor) -> Tensor:
    # expm1 keeps the digits that exp(-d) - 1 loses around d = 0, where policy and reference usually are.
    d = d.clamp(min=-LOG_RATIO_LIMIT)
    return torch.expm1(-d) + d
