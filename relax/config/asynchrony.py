"""How far rollout may be ahead, what is done about it, and which options of it act in lockstep or only there.

Pure, like checks.py, which takes these checks up.
"""

from collections.abc import Iterator

from relax.config.fields import flag
from relax.config.resolve import Resolved
from relax.config.simulated import is_simulated
from relax.config.violation import Violation, refuse

CONSTANT_FILTER = "relax.algorithms.filters:reward_is_not_constant"


def staleness_lead_and_interval(resolved: Resolved) -> Iterator[Violation]:
    options = resolved.options
    bound, lead, interval = options.max_staleness, options.rollout_lead, options.update_weights_interval
    if lead > bound:
        problem = f"batches this far ahead would be trained too old: --max-staleness is {bound}"
        yield refuse(options, "rollout_lead", problem, f"Set --rollout-lead to at most {bound}, or leave it out.")
    if interval - 1 > min(bound, lead):
        which = "--max-staleness" if bound < interval - 1 else "--rollout-lead"
        problem = f"rollout would wait for ever for a version that only the next batches bring: {which} is too small"
        fix = f"Set --max-staleness and --rollout-lead to at least {interval - 1}, or --update-weights-interval to 1."
        yield refuse(options, "update_weights_interval", problem, fix)


def off_policy_correction_is_explicit(resolved: Resolved) -> Iterator[Violation]:
    options = resolved.options
    corrected = options.use_tis or options.use_rollout_logprobs
    if options.no_off_policy_correction and (options.max_staleness == 0 or corrected):
        why = "in lockstep there is nothing to correct" if options.max_staleness == 0 else "a correction is on"
        yield refuse(options, "no_off_policy_correction", f"cannot act: {why}", "Leave it out.")
    if options.max_staleness == 0 or corrected or options.no_off_policy_correction or is_simulated(resolved.topology):
        return
    problem = (
        "samples of older policies need a correction, and there is none: with recomputed log-probs and one step per "
        "batch the ratio is 1, so that clipping cannot act"
    )
    fix = "Add --use-tis or --use-rollout-logprobs; or --no-off-policy-correction, if that is what you want to study."
    yield refuse(options, "max_staleness", problem, fix)


def samples_of_several_versions(resolved: Resolved) -> Iterator[Violation]:
    options = resolved.options
    if options.partial_rollout and options.max_staleness == 0:
        problem = "in lockstep every token is of the trainer's version, so no sample may go on under new weights"
        fix = f"Leave {flag('partial_rollout')} out, or set {flag('max_staleness')} to 1 or more."
        yield refuse(options, "partial_rollout", problem, fix)
    if options.mask_offpolicy_in_partial_rollout and not options.partial_rollout:
        problem = f"cannot act: without {flag('partial_rollout')} no sample holds two versions"
        fix = f"Add {flag('partial_rollout')}, or leave it out."
        yield refuse(options, "mask_offpolicy_in_partial_rollout", problem, fix)


def spare_groups(resolved: Resolved) -> Iterator[Violation]:
    options = resolved.options
    groups, batch = options.over_sampling_batch_size, options.rollout_batch_size
    if groups is None:
        return
    if options.max_staleness > 0:
        problem = f"spare groups exist in lockstep alone; here --max-staleness is {options.max_staleness}"
        fix = "Leave it out: rollout runs ahead, so that nobody waits for the longest of a batch."
        yield refuse(options, "over_sampling_batch_size", problem, fix)
    elif groups <= batch:
        problem = f"leaves no group to spare: --rollout-batch-size is {batch}"
        yield refuse(options, "over_sampling_batch_size", problem, f"Set it above {batch}, or leave it out.")


def stragglers_can_be_told(resolved: Resolved) -> Iterator[Violation]:
    options = resolved.options
    if options.straggler_timeout == 0 and options.rollout_lead == 0:
        problem = "cannot act: with --rollout-lead 0 a batch waits for all of its groups from the start"
        fix = "Set it above the seconds that a group usually takes, or --rollout-lead to 1 or more."
        yield refuse(options, "straggler_timeout", problem, fix)
    elif options.straggler_timeout is not None and options.straggler_timeout >= options.stall_timeout:
        problem = f"cannot act: where nothing else moves, --stall-timeout {options.stall_timeout:g} ends the run before"
        fix = f"Set it below {options.stall_timeout:g}, or --stall-timeout above it."
        yield refuse(options, "straggler_timeout", problem, fix)


def credit(resolved: Resolved) -> Iterator[Violation]:
    options = resolved.options
    if options.max_staleness == 0 and options.is_set("rollout_credit"):
        problem = "cannot act: in lockstep a replica is given its whole share of a batch at once"
        yield refuse(options, "rollout_credit", problem, "Leave it out, or set --max-staleness to 1 or more.")


def a_group_can_pass_the_filter(resolved: Resolved) -> Iterator[Violation]:
    options = resolved.options
    if options.dynamic_sampling_filter_path == CONSTANT_FILTER and options.n_samples_per_prompt == 1:
        problem = "no group could pass it: the reward of one sample never differs within its group"
        fix = "Set --n-samples-per-prompt to 2 or more, or leave it out."
        yield refuse(options, "dynamic_sampling_filter_path", problem, fix)
