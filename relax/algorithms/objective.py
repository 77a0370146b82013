"""The loss of one micro-batch: which log-probs are old, masks, the policy term and its weights, entropy, KL, reduction.

loss = reduce(TokenLoss x TIS or IcePop weight x sequence mask) - entropy_coef reduce(entropy) + kl_loss_coef reduce(kl)

`reduce` divides by the denominators of the whole optimizer batch, so the losses of its micro-batches, on whatever
ranks, add up to the loss of the batch. Nothing here knows of processes or of Megatron.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax.algorithms import corrections, hooks, kl, losses, reduce
from relax.algorithms.proximal import has_ratio, proximal_source
from relax.algorithms.registry import AlgorithmSpec
from relax.algorithms.tensors import clamped_ratio, masked

Metrics = dict[str, tuple[Tensor, Tensor]]
"""name -> (sum, count), detached 0-d tensors; sums of micro-batches and ranks add up, and are divided once."""


@dataclass(frozen=True, slots=True)
class Denominators:
    """What the whole optimizer batch is divided by, over all micro-batches and ranks: its loss tokens and its scored
    samples (an empty response counts, an abstaining one does not)."""

    tokens: int
    samples: int

    @classmethod
    def of(cls, loss_mask: np.ndarray, rewards: np.ndarray) -> "Denominators":
        """From the loss mask (any shape) and the rewards [N] (NaN = abstained) of the optimizer batch."""
        return cls(int(np.count_nonzero(loss_mask)), int(np.isfinite(rewards).sum()))


@dataclass(frozen=True, slots=True)
class Objective:
    """`loss` is a 0-d tensor to run backward on; `metrics` are those of this micro-batch."""

    loss: Tensor
    metrics: Metrics


def objective(
    spec: AlgorithmSpec,
    options: Any,
    current: Tensor,
    entropy: Tensor,
    batch: Mapping[str, Tensor],
    denominators: Denominators,
) -> Objective:
    """The policy loss of one micro-batch.

    current, entropy: [B, T], with gradients. batch, right-padded: `loss_mask`, `behaviour_logprobs`, `advantages`
    [B, T], `rewards` [B] (NaN = abstained), and as the options ask `proximal_logprobs`, `reference_logprobs` [B, T].
    What lies outside the loss mask reaches neither value nor gradient. KeyError names a tensor that is missing,
    HookError a hook (relax.algorithms.hooks) whose result cannot be used.
    """
    mask = batch["loss_mask"].bool()
    micro = _Micro(mask, batch["rewards"], options.calculate_per_token_loss)
    logp = masked(current, mask)
    behaviour = masked(batch["behaviour_logprobs"], mask)
    A = masked(batch["advantages"], mask)
    source = proximal_source(spec, options)
    match source:
        case "behaviour":
            old = behaviour
        case "recomputed":
            old = masked(batch["proximal_logprobs"], mask)
        case _:
            old = logp.detach()

    offered = {"logp": logp, "old_logp": old, "A": A, "mask": mask}
    custom = hooks.LOSS.path(options) is not None
    token = _custom_loss(options, offered) if custom else spec.loss(offered, options)
    micro.add("pg_clipfrac", token.clipped)
    policy = token.loss
    if options.use_tis:
        policy = policy * _mismatch_weight(micro, options, old, behaviour)
    if options.use_opsm:
        kept = corrections.sequence_mask(logp, old, A, mask, options.opsm_delta)
        micro.add("opsm_clipfrac", 1 - kept)
        policy = policy * kept

    total = micro.add("pg_loss", policy)
    if options.entropy_coef:
        total = total - options.entropy_coef * micro.add("entropy", entropy)
    else:
        micro.add("entropy", entropy.detach())
    if options.use_kl_loss:
        divergence = kl.estimate(options.kl_loss_type, logp, masked(batch["reference_logprobs"], mask))
        if options.use_unbiased_kl:
            divergence = divergence * clamped_ratio(logp - old)
        total = total + options.kl_loss_coef * micro.add("kl_loss", divergence)
    micro.metrics["train/loss"] = (total.detach(), micro.count)

    if has_ratio(spec, options):
        micro.add("ppo_kl", old - logp)
    for name, scalar in token.scalars.items():
        micro.scalar(name, scalar)
    _report_mismatch(micro, old if source == "recomputed" else logp.detach(), behaviour)
    divisor = denominators.tokens if options.calculate_per_token_loss else denominators.samples
    return Objective(total / max(divisor, 1), micro.metrics)


def value_objective(options: Any, values: Tensor, batch: Mapping[str, Tensor], denominators: Denominators) -> Objective:
    """The critic's loss of one micro-batch.

    values: [B, T], with gradients. batch, right-padded: `loss_mask`, `values` (those that the advantages were made
    from), `returns` [B, T] and `rewards` [B].
    """
    mask = batch["loss_mask"].bool()
    micro = _Micro(mask, batch["rewards"], options.calculate_per_token_loss)
    old, returns = masked(batch["values"], mask), masked(batch["returns"], mask)
    token = losses.value(masked(values, mask), old, returns, options.value_clip)
    micro.add("value_clipfrac", token.clipped)
    total = micro.add("value_loss", token.loss)
    divisor = denominators.tokens if options.calculate_per_token_loss else denominators.samples
    return Objective(total / max(divisor, 1), micro.metrics)


class _Micro:
    """Sums over one micro-batch in the run's reduction, and the metrics made of them."""

    def __init__(self, mask: Tensor, rewards: Tensor, per_token: bool) -> None:
        self.mask, self.per_token = mask, per_token
        self.metrics: Metrics = {}
        self.count = mask.sum() if per_token else torch.isfinite(rewards).sum()

    def add(self, name: str, x: Tensor) -> Tensor:
        """The numerator of `x` [B, T], recorded as the metric `train/<name>`."""
        total = reduce.token_sum(x, self.mask) if self.per_token else reduce.sample_sum(x, self.mask)
        self.metrics[f"train/{name}"] = (total.detach(), self.count)
        return total

    def scalar(self, name: str, value: Tensor) -> None:
        """A scalar of the whole micro-batch: weighted by its loss tokens in a per-token run, otherwise added once and
        divided by the samples, so that it is per sample, as the reference implementation logs it."""
        self.metrics[f"train/{name}"] = (value * self.count if self.per_token else value, self.count)


def _mismatch_weight(micro: _Micro, options: Any, old: Tensor, behaviour: Tensor) -> Tensor:
    """Recorded: `tis` before the bounds act and `tis_weight` after, the share that they changed, |tis - 1|."""
    ratio = corrections.mismatch_ratio(old, behaviour)
    if hooks.TIS.path(options) is not None:
        weight = hooks.TIS.call(options, old_logp=old.detach(), rollout_logp=behaviour, mask=micro.mask)
        weight = _checked(hooks.TIS, options, "a weight", weight, micro.mask).detach().to(ratio.dtype)
    elif options.tis_mode == "icepop":
        weight = corrections.icepop(old, behaviour, options.tis_clip_low, options.tis_clip)
    else:
        weight = corrections.tis(old, behaviour, options.tis_clip, options.tis_clip_low)
    micro.add("tis", ratio)
    micro.add("tis_weight", weight)
    micro.add("tis_clipfrac", (weight != ratio).to(ratio.dtype))
    micro.add("tis_abs", (ratio - 1).abs())
    return weight


def _custom_loss(options: Any, offered: dict[str, Tensor]) -> losses.TokenLoss:
    token = hooks.LOSS.call(options, **offered)
    if not isinstance(token, losses.TokenLoss):
        raise hooks.LOSS.refuse(options, f"returned a {type(token).__name__}; it must be a losses.TokenLoss")
    loss = _checked(hooks.LOSS, options, "`loss`", token.loss, offered["mask"])
    clipped = _checked(hooks.LOSS, options, "`clipped`", token.clipped, offered["mask"]).to(loss.dtype)
    if offered["logp"].requires_grad and not loss.requires_grad:
        raise hooks.LOSS.refuse(options, "its `loss` has no gradient; it must be computed from logp")
    for name, scalar in token.scalars.items():
        if not isinstance(scalar, Tensor) or scalar.dim():
            raise hooks.LOSS.refuse(options, f"scalar {name!r} is {scalar!r}; it must be a 0-d tensor")
    return losses.TokenLoss(loss, clipped, {name: scalar.detach() for name, scalar in token.scalars.items()})


def _checked(hook: hooks.Hook, options: Any, what: str, x: Any, mask: Tensor) -> Tensor:
    """`x` with 0 outside the mask, when it is a finite tensor like the mask."""
    if not isinstance(x, Tensor) or x.shape != mask.shape:
        seen = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise hook.refuse(options, f"returned {what} of {seen}; it must be a tensor of {tuple(mask.shape)}")
    inside = masked(x, mask)
    # One transfer to the host, and only where a hook is set: better than a NaN that nobody can place.
    bad = (~torch.isfinite(inside)).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise hook.refuse(options, f"{what} of row {row}, token {column}, is {inside[row, column].item()}")
    return inside


def _report_mismatch(micro: _Micro, trainer: Tensor, behaviour: Tensor) -> None:
    """How far the trainer's log-probs lie from the engine's, as KL(behaviour || trainer) by k1 and by k3."""
    micro.add("train_rollout_logprob_abs_diff", (trainer - behaviour).abs())
    micro.add("mismatch_kl", kl.estimate("k1", behaviour, trainer))
    micro.add("mismatch_k3_kl", kl.estimate("k3", behaviour, trainer))
