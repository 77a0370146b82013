"""Whether a run's options make sense for its algorithm. Imports no torch; answers before any process starts.

`violations` refuses a run: its algorithm's contract is broken, options exclude each other, or an option was set that
cannot act in this combination. `warnings` are legal combinations which surprise people.
"""

from collections.abc import Collection, Iterator
from typing import Any

from relax.algorithms import registry
from relax.algorithms.proximal import always_current, proximal_source
from relax.algorithms.registry import AlgorithmSpec
from relax.config.fields import flag
from relax.config.violation import Violation


def violations(options: Any, services: Collection[str] | None = None) -> list[Violation]:
    """Every violation, at most one an option. `options` is a relax.config Options.

    With `services` (the roles of the topology) also those services that the algorithm needs and that are not there, or
    that are there and would have nothing to do.
    """
    spec = registry.get(options.advantage_estimator)
    found: dict[str, Violation] = {}
    for violation in (*spec.contract(options), *_combinations(spec, options), *_without_effect(spec, options)):
        found.setdefault(violation.option, violation)
    if services is not None:
        for violation in _services(spec, options, services):
            found.setdefault(violation.option, violation)
    return list(found.values())


def services_needed(options: Any) -> frozenset[str]:
    """ "critic" and "reference", as far as this run needs them."""
    return _services_needed(registry.get(options.advantage_estimator), options)


def models_saved(options: Any) -> tuple[str, ...]:
    """The roles whose models a checkpoint of this run holds: those that learn, and a reference that is refreshed."""
    learning = sorted({"actor"} | (services_needed(options) & {"critic"}))
    return (*learning, *(["reference"] if options.ref_update_interval is not None else []))


def warnings(options: Any) -> list[str]:
    """What is legal and yet worth a line at the start of the run."""
    return list(_warnings(registry.get(options.advantage_estimator), options))


def _services_needed(spec: AlgorithmSpec, options: Any) -> frozenset[str]:
    return spec.needs | ({"reference"} if options.use_kl_loss else frozenset())


def _combinations(spec: AlgorithmSpec, options: Any) -> Iterator[Violation]:
    """Options that exclude each other, or that need another one."""

    def refuse(name: str, problem: str, fix: str) -> Violation:
        return Violation(flag(name), getattr(options, name), problem, fix)

    steps = options.num_steps_per_rollout
    if options.use_tis and options.use_rollout_logprobs:
        yield refuse(
            "use_tis",
            f"with {flag('use_rollout_logprobs')} proximal and behaviour log-probs are the same, so its weight is 1",
            f"Keep one of {flag('use_tis')} and {flag('use_rollout_logprobs')}.",
        )
    if options.use_tis and options.tis_clip_low > options.tis_clip:
        yield refuse("tis_clip_low", f"is above {flag('tis_clip')} {options.tis_clip:g}", "Set it below.")
    if options.true_on_policy_mode and (options.max_staleness > 0 or steps > 1):
        yield refuse(
            "true_on_policy_mode",
            f"holds only in lockstep with one optimizer step per rollout; here {flag('max_staleness')} is "
            f"{options.max_staleness} and {flag('num_steps_per_rollout')} {steps}",
            f"Set {flag('max_staleness')} 0 and {flag('num_steps_per_rollout')} 1, or leave it out.",
        )
    if options.true_on_policy_mode and options.use_rollout_logprobs:
        yield refuse(
            "use_rollout_logprobs",
            f"with {flag('true_on_policy_mode')} the current log-probs are the proximal ones",
            f"Keep one of {flag('use_rollout_logprobs')} and {flag('true_on_policy_mode')}.",
        )
    if "reference" in _services_needed(spec, options) and options.ref_load is None:
        why = flag("use_kl_loss") if options.use_kl_loss else options.advantage_estimator
        yield refuse("ref_load", f"{why} needs a reference policy", f"Set {flag('ref_load')} to a checkpoint.")
    yield from _truncated_sampling(spec, options)


def _truncated_sampling(spec: AlgorithmSpec, options: Any) -> Iterator[Violation]:
    """top-p and top-k renormalize the engine's log-probs over what they keep; the trainer's cover the vocabulary."""
    users = [flag("use_tis")] if options.use_tis else []
    users += [flag("use_rollout_logprobs")] if proximal_source(spec, options) == "behaviour" else []
    users += [flag("kl_coef")] if "kl" in spec.advantage.inputs else []
    if not users:
        return
    problem = f"{' and '.join(users)} compare with behaviour log-probs, which would be of the truncated distribution"
    if options.rollout_top_p < 1:
        yield Violation(flag("rollout_top_p"), options.rollout_top_p, problem, f"Set {flag('rollout_top_p')} 1.")
    if options.rollout_top_k > 0:
        yield Violation(flag("rollout_top_k"), options.rollout_top_k, problem, f"Set {flag('rollout_top_k')} -1.")


def _without_effect(spec: AlgorithmSpec, options: Any) -> Iterator[Violation]:
    """Options that the user set and that cannot change this run."""

    def idle(names: Collection[str], problem: str, fix: str) -> Iterator[Violation]:
        for name in names:
            if _switched_on(options, name):
                yield Violation(flag(name), getattr(options, name), problem, fix)

    specs = [registry.get(name) for name in registry.names()]
    # A hook is given the options, so it may read those that functions in its place read.
    read = spec.option_names | _readable_by_hooks(specs, options)
    for name in sorted(set().union(*(other.option_names for other in specs)) - read):
        readers = ", ".join(other.name for other in specs if name in other.option_names)
        fix = f"Leave it out; it acts with {readers}."
        if name == "kl_coef":
            fix = f"Use {flag('use_kl_loss')} with {flag('kl_loss_coef')}, or {readers}."
        yield from idle([name], f"{spec.name} has no place for it", fix)

    if options.custom_reward_post_process_path is not None:
        names = ["disable_rewards_normalization", "disable_grpo_std_normalization"]
        problem = f"{flag('custom_reward_post_process_path')} takes the place of the normalizer"
        yield from idle(names, problem, "Keep one of the two.")
    elif not spec.normalizes_rewards:
        yield from idle(["disable_rewards_normalization"], f"{spec.name} takes raw rewards anyway", "Leave it out.")
    if options.disable_rewards_normalization:
        problem = f"rewards are raw by {flag('disable_rewards_normalization')}"
        yield from idle(["disable_grpo_std_normalization"], problem, "Keep one of the two.")
    if not options.use_kl_loss:
        names = ["kl_loss_coef", "kl_loss_type", "use_unbiased_kl"]
        yield from idle(names, "there is no KL term in the loss", f"Add {flag('use_kl_loss')}, or leave it out.")
    if "reference" not in _services_needed(spec, options):
        fix = f"Add {flag('use_kl_loss')}, or leave it out."
        yield from idle(["ref_load", "ref_update_interval"], "nothing in this run compares with a reference", fix)
    if "critic" not in spec.needs:
        names = ["value_clip", "critic_lr", "num_critic_only_steps"]
        yield from idle(names, f"{spec.name} has no critic", "Leave it out.")
    if not options.use_tis:
        fix = f"Add {flag('use_tis')}, or leave it out."
        names = ["tis_clip", "tis_clip_low", "tis_mode", "custom_tis_path"]
        yield from idle(names, "there is no importance weight", fix)
    elif options.custom_tis_path is not None:
        yield from idle(["tis_mode"], f"{flag('custom_tis_path')} takes its place", "Keep one of the two.")
    if not options.use_opsm:
        yield from idle(["opsm_delta"], "no sequence is masked", f"Add {flag('use_opsm')}, or leave it out.")
    if proximal_source(spec, options) == "none":
        names = ["use_rollout_logprobs", "true_on_policy_mode"]
        yield from idle(names, f"{spec.name} compares with no old log-probs", "Leave it out.")


def _readable_by_hooks(specs: list[AlgorithmSpec], options: Any) -> set[str]:
    """Options of the losses and of the discount, where a hook stands in the place of their readers."""
    names: set[str] = set()
    if options.custom_loss_path is not None:
        names.update(*(spec.loss.option_names for spec in specs))
    if options.custom_advantage_path is not None:
        names |= {"gamma", "lambd"}
    return names


def _switched_on(options: Any, name: str) -> bool:
    """Set by the user, and not to the value that means off. Repeating a default that acts (`--eps-clip 0.2`) counts:
    the user expects something of it."""
    value = getattr(options, name)
    off = not value and value == type(options).model_fields[name].default
    return options.is_set(name) and not off


def _services(spec: AlgorithmSpec, options: Any, services: Collection[str]) -> Iterator[Violation]:
    needed = _services_needed(spec, options)
    for role in ("critic", "reference"):
        if role in needed and role not in services:
            yield Violation(
                f"services.{role}", None, f"{spec.name} with these options needs it", f"Add `{role}: {{}}` to services."
            )
        if role in services and role not in needed:
            yield Violation(f"services.{role}", role, f"{spec.name} with these options has no use for it", "Remove it.")


def _warnings(spec: AlgorithmSpec, options: Any) -> Iterator[str]:
    if always_current(spec, options):
        # What a loss of the user does with a ratio of 1 is not known.
        own = spec.loss.option_names if spec.ratio and options.custom_loss_path is None else ()
        names = [name for name in own if getattr(options, name) is not None]
        names += ["use_opsm", "opsm_delta"] if options.use_opsm else []
        if names:
            why = (
                f"{flag('true_on_policy_mode')} sets proximal := current"
                if options.true_on_policy_mode
                else "proximal log-probs are recomputed and a batch is one optimizer step"
            )
            yield (
                f"{why}, so the ratio is 1 at every step and {', '.join(map(flag, names))} cannot act. "
                f"To make them act: {flag('use_rollout_logprobs')}, or {flag('num_steps_per_rollout')} 2 or more."
            )
    elif _never_negative(spec, options):
        names = [name for name in NEGATIVE if name in spec.loss.option_names and _switched_on(options, name)]
        names += ["use_opsm"] if options.use_opsm else []
        if names:
            yield (
                "advantages are the raw rewards of a verifier that pays 0 or 1, so none is negative and "
                f"{', '.join(map(flag, names))} cannot act. To make them act: a reward normalizer, or a reward that "
                "may be negative."
            )
    if options.max_staleness > 0 and options.no_off_policy_correction:
        age = f"samples up to {options.max_staleness} batches old"
        yield f"{flag('no_off_policy_correction')}: {age} are trained as if the current policy had sampled them."
    normalized = spec.normalizes_rewards and not options.disable_rewards_normalization
    if normalized and options.n_samples_per_prompt == 1 and options.custom_reward_post_process_path is None:
        yield (
            f"{flag('n_samples_per_prompt')} 1: a sample is compared with its own group, so every advantage is 0 and "
            "nothing is learned from rewards."
        )
    yield from _kl_warnings(options)
    if advice := spec.advice(options):
        yield f"{spec.name} is recommended with {', '.join(advice)}."


# Options that change the loss only of tokens whose advantage is negative.
NEGATIVE = ("eps_clip", "eps_clip_c", "sapo_tau_neg", "m2po_miniclip_low")


def _never_negative(spec: AlgorithmSpec, options: Any) -> bool:
    """Whether advantages are rewards as a verifier pays them that pays 0 or 1; of others nothing is known."""
    raw = options.disable_rewards_normalization or not spec.normalizes_rewards
    hooked = options.custom_reward_post_process_path or options.custom_advantage_path or options.custom_loss_path
    broadcast = spec.advantage is registry.BROADCAST and not options.normalize_advantages
    binary = options.rm_type in ("exact_match", "math") or options.rm_exact
    return raw and broadcast and binary and hooked is None


def _kl_warnings(options: Any) -> Iterator[str]:
    if not options.use_kl_loss:
        return
    if options.kl_loss_coef == 0:
        yield f"{flag('kl_loss_coef')} 0: the KL is measured and does not act."
    elif options.kl_loss_type == "k1" and not options.use_unbiased_kl:
        yield (
            f"{flag('kl_loss_type')} k1 in the loss has a gradient of expectation 0; {flag('use_unbiased_kl')} gives "
            "it the gradient of the KL."
        )
    elif options.use_unbiased_kl and options.kl_loss_type == "k2":
        yield f"{flag('use_unbiased_kl')}: k2 times the ratio has not the gradient of the KL; k1 and k3 have."
    elif options.use_unbiased_kl and not options.use_rollout_logprobs and options.max_staleness > 0:
        yield (
            f"{flag('use_unbiased_kl')} is exact only where proximal = behaviour log-probs; stale samples bias it "
            f"without {flag('use_rollout_logprobs')}."
        )
