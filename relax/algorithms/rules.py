"""The contract of each algorithm: what a run's options must satisfy for the algorithm to be the one that its authors
describe. Reads options alone; imports no torch.

Each function returns every violation it finds. `contracts` adds what holds for all algorithms.
"""

from typing import Any

from relax.config.fields import flag
from relax.config.violation import Violation


def nothing(options: Any) -> list[Violation]:
    """The contract of an algorithm that runs in every combination."""
    return []


def no_advice(options: Any) -> list[str]:
    return []


def m2po(options: Any) -> list[Violation]:
    rules = _Rules("m2po", options)
    rules.context_parallel("the band is solved over the tokens of one rank's micro-batch")
    rules.check(
        options.max_staleness == 0 or options.use_rollout_logprobs,
        "max_staleness",
        "m2po bounds how far the policy is from the one that sampled, which recomputed log-probs do not show",
        f"Add {flag('use_rollout_logprobs')}, or set {flag('max_staleness')} 0",
    )
    return rules.found


def rloo(options: Any) -> list[Violation]:
    rules = _Rules("rloo", options)
    rules.group_of_two("the baseline of a sample is the mean of the others")
    samples = options.rollout_batch_size * options.n_samples_per_prompt
    rules.check(
        options.global_batch_size == samples,
        "global_batch_size",
        f"rloo takes one optimizer step over the whole rollout batch, {options.rollout_batch_size} prompts x "
        f"{options.n_samples_per_prompt} samples = {samples}",
        f"Set {flag('global_batch_size')} {samples}, or leave it out",
    )
    rules.check(
        options.num_steps_per_rollout == 1,
        "num_steps_per_rollout",
        "rloo has no importance ratio, so only the first step is on policy",
        f"Leave {flag('num_steps_per_rollout')} out, or set it to 1",
    )
    rules.on("calculate_per_token_loss", "rloo's loss is a mean over the tokens of the batch")
    rules.no_reward_kl(f"Use {flag('use_kl_loss')} with {flag('kl_loss_coef')}")
    rules.lockstep("it has no importance ratio to correct stale samples with")
    rules.rewards_normalized()
    rules.off("normalize_advantages", "whitening would undo the leave-one-out baseline")
    rules.off("partial_rollout", "a sample would hold tokens of an older policy")
    return rules.found


def ppo(options: Any) -> list[Violation]:
    rules = _Rules("ppo", options)
    rules.lockstep("its values and advantages belong to the policy in training")
    rules.no_reward_kl(f"Set {flag('kl_coef')} 0")
    rules.off("use_kl_loss", "ppo keeps near the old policy by its clip alone")
    return rules.found


def reinforce_plus_plus(options: Any) -> list[Violation]:
    rules = _Rules("reinforce_plus_plus", options)
    rules.on("normalize_advantages", "its advantages are the returns, whitened over the rollout batch")
    rules.check(
        options.kl_coef > 0,
        "kl_coef",
        "reinforce_plus_plus puts the KL to the reference into the reward",
        f"Set {flag('kl_coef')} above 0, e.g. 0.01, and {flag('ref_load')}",
    )
    rules.off("use_kl_loss", f"its KL is in the reward ({flag('kl_coef')})")
    rules.whitened_batch()
    return rules.found


def reinforce_plus_plus_baseline(options: Any) -> list[Violation]:
    rules = _Rules("reinforce_plus_plus_baseline", options)
    rules.group_of_two("the baseline is the mean of the group")
    rules.on("normalize_advantages", "its advantages are whitened over the rollout batch")
    rules.no_reward_kl(f"Set {flag('kl_coef')} 0 and use {flag('use_kl_loss')}")
    rules.on("use_kl_loss", "its KL is a term of the loss")
    rules.check(
        options.kl_loss_type == "k2",
        "kl_loss_type",
        "reinforce_plus_plus_baseline takes the k2 estimator",
        f"Set {flag('kl_loss_type')} k2",
    )
    rules.check(
        options.kl_loss_coef > 0,
        "kl_loss_coef",
        "reinforce_plus_plus_baseline needs a KL term that counts",
        f"Set {flag('kl_loss_coef')} above 0, e.g. 0.001, and {flag('ref_load')}",
    )
    rules.rewards_normalized()
    rules.check(
        options.custom_reward_post_process_path is None,
        "custom_reward_post_process_path",
        "it would replace the group mean that makes the baseline",
        "Leave it out",
    )
    rules.whitened_batch()
    return rules.found


def cispo_advice(options: Any) -> list[str]:
    wanted = {
        "eps_clip_high": 10.0,
        "use_kl_loss": True,
        "kl_loss_coef": 0.001,
        "use_tis": True,
        "clip_grad": 1.0,
        "calculate_per_token_loss": True,
    }
    return [_setting(name, value) for name, value in wanted.items() if getattr(options, name) != value]


def m2po_advice(options: Any) -> list[str]:
    advice = []
    if not 0.01 <= options.m2po_kl2_budget <= 0.04:
        advice.append(f"{flag('m2po_kl2_budget')} 0.01 to 0.04 (the paper: 0.04)")
    if (options.m2po_miniclip_low, options.m2po_miniclip_high) != (0.2, 0.28):
        floors = f"{flag('m2po_miniclip_low')} 0.2 {flag('m2po_miniclip_high')} 0.28"
        advice.append(f"{floors} (or the clip bounds of the GRPO run it is compared with)")
    return advice


def _setting(name: str, value: Any) -> str:
    return flag(name) if value is True else f"{flag(name)} {value:g}"


class _Rules:
    """Collects the violations of one algorithm's contract."""

    def __init__(self, algorithm: str, options: Any) -> None:
        self.algorithm, self.options = algorithm, options
        self.found: list[Violation] = []

    def check(self, holds: bool, name: str, problem: str, fix: str) -> None:
        if not holds:
            self.found.append(Violation(flag(name), getattr(self.options, name), problem, f"{fix}."))

    def on(self, name: str, why: str) -> None:
        problem = f"{self.algorithm} needs it on: {why}"
        self.check(bool(getattr(self.options, name)), name, problem, f"Add {flag(name)}")

    def off(self, name: str, why: str) -> None:
        problem = f"{self.algorithm} needs it off: {why}"
        self.check(not getattr(self.options, name), name, problem, f"Leave {flag(name)} out")

    def lockstep(self, why: str) -> None:
        problem = f"{self.algorithm} runs in lockstep: {why}"
        self.check(self.options.max_staleness == 0, "max_staleness", problem, f"Set {flag('max_staleness')} 0")

    def group_of_two(self, why: str) -> None:
        problem = f"{self.algorithm} needs groups of two or more: {why}"
        fix = f"Set {flag('n_samples_per_prompt')} 2 or more"
        self.check(self.options.n_samples_per_prompt >= 2, "n_samples_per_prompt", problem, fix)

    def no_reward_kl(self, fix: str) -> None:
        problem = f"{self.algorithm} has no place for a KL in the reward"
        self.check(self.options.kl_coef == 0, "kl_coef", problem, fix)

    def rewards_normalized(self) -> None:
        self.off("disable_rewards_normalization", "the reward normalizer is the algorithm's baseline")

    def context_parallel(self, why: str) -> None:
        problem = f"{self.algorithm} does not run with context parallelism: {why}"
        holds = self.options.context_parallel_size == 1
        self.check(holds, "context_parallel_size", problem, f"Set {flag('context_parallel_size')} 1")

    def whitened_batch(self) -> None:
        self.context_parallel("whitening weighs every token of the rollout batch alike")
        self.off("calculate_per_token_loss", "its loss is a mean over samples of token means")
