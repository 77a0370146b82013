"""Where the prompts end a run: after how many batches, and whether with a short one that the algorithm cannot train."""

from math import isqrt
from typing import Any

from relax.config.fields import flag
from relax.config.violation import Violation

READS = frozenset({"advantage_estimator", "rollout_batch_size", "num_epoch", "num_rollout", "overlong_prompts"})


def check_tail(options: Any) -> list[Violation]:
    """With --num-epoch, the passes over the prompts must fill whole batches where the algorithm trains no other.

    One stream runs through all passes, so that only their sum matters. Opens the dataset, on the controller's host;
    one that cannot be opened is left to the check of the data.
    """
    from relax.algorithms import registry

    spec, epochs, groups = registry.get(options.advantage_estimator), options.num_epoch, options.rollout_batch_size
    if not spec.whole_batches or epochs is None:
        return []
    problem = f"{spec.name} trains whole batches only"
    if options.overlong_prompts == "filter":
        # How many pass the filter is known when all are tokenized; a dataset may be too large for that here.
        told = f"{problem}, and how many prompts {flag('overlong_prompts')} filter leaves in is not known beforehand"
        fix = f"End the run with {flag('num_rollout')} alone, or set {flag('overlong_prompts')} refuse."
        return [Violation(flag("num_epoch"), epochs, told, fix)]
    prompts = prompt_count(options)
    if prompts is None:
        return []
    total = prompts * epochs
    if total % groups == 0 or (options.num_rollout or total) * groups <= total:
        return []
    passes = f"{epochs} pass{'es' if epochs > 1 else ''} over {prompts} prompts"
    told = f"{problem}: {passes} are {total}, and batches of {groups} would leave {total % groups} for the last one"
    sizes = " or ".join(str(size) for size in _nearest_divisors(total, groups))
    fix = f"Set {flag('rollout_batch_size')} {sizes}"
    if total > groups:
        fix += f"; or {flag('num_rollout')} {total // groups}, which ends before the short batch"
    return [Violation(flag("num_epoch"), epochs, told, f"{fix}.")]


def planned_batches(options: Any, *, prompts: int | None = None) -> int | None:
    """How many batches the run will have: the earlier of --num-rollout and --num-epoch. None when that is not known
    beforehand: how many prompts --overlong-prompts filter leaves, or the prompts are on another host.

    `prompts` is the size of the dataset, for callers that have it open.
    """
    if options.num_epoch is None:
        return options.num_rollout
    if options.overlong_prompts == "filter":
        return None
    prompts = prompt_count(options) if prompts is None else prompts
    if prompts is None:
        return None
    batches = -(-prompts * options.num_epoch // options.rollout_batch_size)
    return min(batches, options.num_rollout or batches)


def prompt_count(options: Any) -> int | None:
    """The rows of --prompt-data; None where they cannot be opened on this host."""
    from relax.data import DataError, open_source
    from relax.data.generated import default_size, parse_spec
    from relax.data.sources import REASONING_GYM

    spec = str(options.prompt_data)
    try:
        if spec.startswith(REASONING_GYM):
            # Importing reasoning-gym takes longer than a check may, and its source tells the size too.
            parsed = parse_spec(spec)
            size = parsed.config.get("size", default_size(parsed.task))
            if isinstance(size, int):
                return size
        return len(open_source(spec, seed=options.seed))
    except DataError:
        return None


def _nearest_divisors(total: int, size: int) -> list[int]:
    """The divisors of `total` next to `size`: the largest below it and the smallest above."""
    small = [divisor for divisor in range(1, isqrt(total) + 1) if total % divisor == 0]
    divisors = sorted({*small, *(total // divisor for divisor in small)})
    below, above = [d for d in divisors if d < size], [d for d in divisors if d > size]
    return [*below[-1:], *above[:1]]
