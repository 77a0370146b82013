"""Which log-probs are the old ones of a run. Needed before any tensor exists, so it imports no torch."""

from typing import Any, Literal

from relax.algorithms.registry import AlgorithmSpec

Proximal = Literal["behaviour", "current", "recomputed", "none"]


def proximal_source(spec: AlgorithmSpec, options: Any) -> Proximal:
    """Where the old log-probs come from; "none" when nothing compares against them.

    Only for "recomputed" does the actor run a forward pass before the batch's first step.
    """
    unbiased_kl = options.use_kl_loss and options.use_unbiased_kl
    if not (has_ratio(spec, options) or options.use_tis or options.use_opsm or unbiased_kl):
        return "none"
    if options.use_rollout_logprobs:
        return "behaviour"
    return "current" if options.true_on_policy_mode else "recomputed"


def has_ratio(spec: AlgorithmSpec, options: Any) -> bool:
    """Whether the policy loss takes old log-probs. A loss of the user may, whatever that of the algorithm does."""
    return spec.ratio is not None or options.custom_loss_path is not None


def always_current(spec: AlgorithmSpec, options: Any) -> bool:
    """Whether proximal = current at every optimizer step, so that every ratio between the two is 1."""
    match proximal_source(spec, options):
        case "current":
            return True
        case "recomputed":
            return options.num_steps_per_rollout == 1
    return False
