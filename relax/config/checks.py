"""Whether the options of a run fit each other. Pure: looks at no file and no machine (see machine.py for those).

Each check names the options it reads: where one of them was refused already, its stand-in says nothing and the check
is left out. A check yields violations; together they are the one message a user gets.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import prod

from relax.config import asynchrony
from relax.config.budget import RestartBudget
from relax.config.fields import flag
from relax.config.options import Options
from relax.config.reach import other_hosts_need_keys
from relax.config.refusals import NAME_FIX
from relax.config.resolve import Resolved
from relax.config.schema import LONGEST_RUN_NAME, RANKED, RUN_NAME
from relax.config.simulated import a_simulated_engine_has_no_model, engines_agree, is_simulated, options_act
from relax.config.topology import Topology
from relax.config.violation import Violation, refuse

Check = Callable[[Resolved], Iterable[Violation]]


def check_options(resolved: Resolved) -> list[Violation]:
    """Every violation between options, those of the algorithm's contract included, each with its source.

    What the contract says of an option is all that is said of it: it is stricter, so that the general rule's remedy
    would only lead to the next refusal.
    """
    from relax.algorithms.contracts import violations

    found = [
        violation for check in CHECKS if check.reads.isdisjoint(resolved.suspects) for violation in check(resolved)
    ]
    roles = {service.role for service in resolved.topology.services} if resolved.topology else None
    contract = violations(resolved.options, roles)
    if is_simulated(resolved.topology):
        # Without a model no remedy of an algorithm would help.
        said = {violation.option for violation in found}
        contract = [violation for violation in contract if violation.option not in said]
    named = {violation.option for violation in contract}
    return located(resolved, [*(violation for violation in found if violation.option not in named), *contract])


def warnings(resolved: Resolved) -> list[str]:
    """What is legal but probably not meant; printed once at start."""
    from relax.algorithms.contracts import warnings as algorithm_warnings

    found = [] if is_simulated(resolved.topology) else list(algorithm_warnings(resolved.options))
    if resolved.options.save and resolved.options.run_dir is None and _apart(resolved.topology):
        found.append(
            "no checkpoint will be written: controller and models are on several hosts; give --run-dir on a file "
            "system that all of them share, or --no-save"
        )
    return found


def located(resolved: Resolved, found: Iterable[Violation]) -> list[Violation]:
    """`found` with sources filled in, without those of options that are refused for themselves or not built yet."""
    kept = []
    for violation in found:
        name = violation.option.removeprefix("--").replace("-", "_")
        source = violation.source or resolved.sources.get(name, "")
        violation = replace(violation, source="" if source == "default" else source)
        # Two checks that meet the same fault say the same of it.
        if name not in resolved.suspects and violation not in kept:
            kept.append(violation)
    return kept


def _apart(topology: Topology | None) -> bool:
    """Whether what writes parts of a checkpoint is on another host than the controller."""
    if topology is None:
        return False
    return len({service.node for service in topology.services if service.role in ("controller", "actor", "critic")}) > 1


class _Reading:
    def __init__(self, check: Check, reads: frozenset[str]) -> None:
        self.check, self.reads = check, reads

    def __call__(self, resolved: Resolved) -> Iterable[Violation]:
        return self.check(resolved)


CHECKS: list[_Reading] = []


def _reads(*names: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS.append(_Reading(check, frozenset(names)))
        return check

    return register


@_reads("num_rollout", "num_epoch")
def _has_an_end(resolved: Resolved) -> Iterator[Violation]:
    options = resolved.options
    if options.num_rollout is None and options.num_epoch is None:
        yield refuse(options, "num_rollout", "is not set, and neither is --num-epoch", "Say when the run ends.")


@_reads("save", "save_interval", "keep_checkpoints", "num_rollout", "run_dir")
def _checkpoints_are_written(resolved: Resolved) -> Iterator[Violation]:
    options = resolved.options
    if options.save and options.save_interval is not None and options.run_dir is None and _apart(resolved.topology):
        problem = "cannot act: controller and models are on hosts that share no run directory"
        yield refuse(options, "save_interval", problem, "Give --run-dir on a file system that all of them share.")
        return
    interval, last = options.save_interval, options.num_rollout
    if options.save:
        if interval is not None and last is not None and interval >= last:
            problem = f"cannot act: the run ends after {last} batches, and then a checkpoint is written anyway"
            yield refuse(options, "save_interval", problem, "Leave it out, or give fewer batches.")
        return
    for name in ("save_interval", "keep_checkpoints"):
        if options.is_set(name):
            problem = "cannot act: --no-save writes no checkpoint"
            yield refuse(options, name, problem, f"Leave --no-save or {flag(name)} out.")


@_reads("restart_budget")
def _restart_budget_is_one(resolved: Resolved) -> Iterator[Violation]:
    try:
        RestartBudget.parse(resolved.options.restart_budget)
    except ValueError:
        problem = "is not N/SECONDS, with N of at least 0 and SECONDS above 0"
        yield refuse(resolved.options, "restart_budget", problem, "Say 3/600, or 0/600 for no restart at all.")


@_reads("run_name")
def _the_name_can_name_a_directory(resolved: Resolved) -> Iterator[Violation]:
    name = resolved.options.run_name
    if not re.fullmatch(RUN_NAME, name):
        yield refuse(resolved.options, "run_name", "is no name", NAME_FIX)
    elif len(name) > LONGEST_RUN_NAME:
        yield refuse(resolved.options, "run_name", "is too long", f"Give at most {LONGEST_RUN_NAME} characters.")


@_reads("rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "num_steps_per_rollout")
def _batch_sizes_divide(resolved: Resolved) -> Iterator[Violation]:
    options = resolved.options
    groups, per_group = options.rollout_batch_size, options.n_samples_per_prompt
    samples, steps, step = groups * per_group, options.num_steps_per_rollout, options.global_batch_size
    if samples == steps * step:
        return
    batch = f"a rollout batch has {groups} prompts x {per_group} samples = {samples} samples"
    divisors = [size for size in range(1, samples + 1) if samples % size == 0]
    if options.is_set("global_batch_size") and not options.is_set("num_steps_per_rollout"):
        near = sorted(divisors, key=lambda size: abs(size - step))[:3]
        fix = f"Set it to a divisor of {samples}, e.g. {_either(sorted(near))}."
        yield refuse(options, "global_batch_size", f"{batch}, which steps of {step} do not divide", fix)
    elif options.is_set("global_batch_size"):
        problem = f"{batch}, but {steps} steps of {step} are {steps * step}"
        fix = f"Set --global-batch-size {samples // steps or 1} or leave it out." if samples % steps == 0 else ""
        yield refuse(
            options,
            "global_batch_size",
            problem,
            fix or f"Leave --num-steps-per-rollout out; {step} must divide {samples}.",
        )
    else:
        near = sorted(divisors, key=lambda count: abs(count - steps))[:3]
        fix = f"Set it to a divisor of {samples}, e.g. {_either(sorted(near))}."
        yield refuse(options, "num_steps_per_rollout", f"{batch}, which {steps} steps do not divide", fix)


_reads("max_staleness", "rollout_lead", "update_weights_interval")(asynchrony.staleness_lead_and_interval)
_reads("max_staleness", "use_tis", "use_rollout_logprobs", "no_off_policy_correction", "advantage_estimator")(
    asynchrony.off_policy_correction_is_explicit
)
_reads("max_staleness", "partial_rollout", "mask_offpolicy_in_partial_rollout")(asynchrony.samples_of_several_versions)
_reads("max_staleness", "over_sampling_batch_size", "rollout_batch_size")(asynchrony.spare_groups)
_reads("straggler_timeout", "rollout_lead", "stall_timeout")(asynchrony.stragglers_can_be_told)
_reads("max_staleness", "rollout_credit")(asynchrony.credit)
_reads("dynamic_sampling_filter_path", "n_samples_per_prompt")(asynchrony.a_group_can_pass_the_filter)


@_reads(
    "lr_decay_style",
    "lr_decay_steps",
    "lr_warmup_steps",
    "min_lr",
    "lr",
    "critic_lr",
    "num_rollout",
    "num_steps_per_rollout",
    "num_critic_only_steps",
)
def _schedule(resolved: Resolved) -> Iterator[Violation]:
    options = resolved.options
    style, steps, warmup = options.lr_decay_style, options.lr_decay_steps, options.lr_warmup_steps
    if style == "constant":
        for name in ("lr_decay_steps", "min_lr"):
            if options.is_set(name):
                yield refuse(
                    options, name, "cannot act: --lr-decay-style is constant", "Leave it out, or choose a style."
                )
    elif steps is None:
        fix = "Set --lr-decay-steps (in optimizer steps) or --num-rollout."
        yield refuse(options, "lr_decay_style", "needs to know where the decay ends", fix)
    elif options.min_lr > options.lr:
        yield refuse(options, "min_lr", f"is above --lr {options.lr:g}", "Set it below.")
    elif options.min_lr > options.critic_lr:
        yield refuse(options, "min_lr", f"is above --critic-lr {options.critic_lr:g}", "Set it below.")
    end = steps if style != "constant" else None
    if end is None and options.num_rollout is not None:
        end = (options.num_rollout - options.num_critic_only_steps) * options.num_steps_per_rollout
    if end is not None and 0 < end <= warmup:
        problem = f"the whole schedule has {end} optimizer steps, so the rate would never reach --lr"
        yield refuse(options, "lr_warmup_steps", problem, f"Set it below {end}.")


@_reads("num_critic_only_steps", "num_rollout")
def _the_policy_trains(resolved: Resolved) -> Iterator[Violation]:
    options = resolved.options
    if options.num_rollout is not None and options.num_critic_only_steps >= options.num_rollout:
        problem = f"the run has {options.num_rollout} batches, so the policy would never train"
        fix = f"Set it below --num-rollout {options.num_rollout}."
        yield refuse(options, "num_critic_only_steps", problem, fix)


@_reads("ref_update_interval", "update_weights_interval")
def _the_reference_is_refreshed_by_published_versions(resolved: Resolved) -> Iterator[Violation]:
    options = resolved.options
    every, published = options.ref_update_interval, options.update_weights_interval
    if every is not None and every % published:
        problem = f"the versions it needs are not published: --update-weights-interval is {published}"
        yield refuse(options, "ref_update_interval", problem, f"Set it to a multiple of {published}.")


@_reads(
    "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "sequence_parallel", "global_batch_size"
)
def _ranks(resolved: Resolved) -> Iterator[Violation]:
    if resolved.options.sequence_parallel and resolved.options.tensor_parallel_size == 1:
        problem = "cannot act: --tensor-parallel-size is 1"
        yield refuse(resolved.options, "sequence_parallel", problem, "Leave it out.")
    for service in resolved.topology.services if resolved.topology else ():
        if service.role not in RANKED:
            continue
        options = service.options(resolved.options)
        model, where = model_ranks(options), f"services.{service.role}"
        ranks = service.ranks or model
        if ranks % model:
            problem = f"one copy of the model takes {model} ranks (tensor x pipeline x context parallel)"
            yield Violation(f"{where}.ranks", ranks, problem, f"Set it to a multiple of {model}.", service.source)
        elif service.role != "reference" and options.global_batch_size % (ranks // model):
            problem = (
                f"{ranks // model} data-parallel ranks do not divide --global-batch-size {options.global_batch_size}"
            )
            yield Violation(f"{where}.ranks", ranks, problem, "Change one of them.", service.source)
        if service.sizes.get("expert_parallel_size", 1) > 1:
            size = service.sizes["expert_parallel_size"]
            problem = "is not available yet"
            fix = "No mixture-of-experts model is supported yet; leave it out."
            yield Violation(f"{where}.expert_parallel_size", size, problem, fix, service.source)
        if service.sizes.get("sequence_parallel") and options.tensor_parallel_size == 1:
            problem = "cannot act: tensor_parallel_size is 1 there"
            yield Violation(f"{where}.sequence_parallel", True, problem, "Leave it out.", service.source)


def model_ranks(options: Options) -> int:
    """Processes that one copy of a service's model takes."""
    sizes = (options.tensor_parallel_size, options.pipeline_parallel_size, options.context_parallel_size)
    return prod(sizes)


_reads()(engines_agree)
_reads()(a_simulated_engine_has_no_model)
_reads()(options_act)


_reads("insecure", "keys", "controller")(other_hosts_need_keys)


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)


__all__ = ["CHECKS", "check_options", "located", "model_ranks", "warnings"]
