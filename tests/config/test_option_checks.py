"""Options that are each legal and together are not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import load

from relax.config import ConfigError
from relax.config.checks import check_options, warnings
from relax.config.resolve import resolve

Write = Callable[..., Path]


def refusals(file: Path) -> dict[str, str]:
    try:
        load([], file)
    except ConfigError as refused:
        return {violation.option: str(violation) for violation in refused.violations}
    return {}


# Options with the services that they need.
PPO: dict[str, Any] = {"advantage_estimator": "ppo", "services": {"critic": {}}}
KL: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_load": "ref", "services": {"reference": {}}}

LEGAL: list[dict[str, Any]] = [
    {},
    {"global_batch_size": 4},
    {"num_steps_per_rollout": 4},
    {"global_batch_size": 4, "num_steps_per_rollout": 2},
    {"max_staleness": 2, "use_tis": True},
    {"max_staleness": 2, "use_rollout_logprobs": True},
    {"max_staleness": 2, "no_off_policy_correction": True},
    {"max_staleness": 1, "use_tis": True, "partial_rollout": True},
    {"max_staleness": 1, "use_tis": True, "partial_rollout": True, "mask_offpolicy_in_partial_rollout": True},
    {"max_staleness": 4, "rollout_lead": 3, "update_weights_interval": 4, "use_tis": True},
    {"lr_decay_style": "cosine", "lr_warmup_steps": 2, "min_lr": 1e-7},
    {"num_rollout": None, "num_epoch": 1},
    {"straggler_timeout": 5.0},
    {"straggler_timeout": 0.0, "max_staleness": 1, "use_tis": True},
    {"over_sampling_batch_size": 6, "straggler_timeout": 5.0},
    PPO | {"num_critic_only_steps": 3, "critic_lr": 1e-5},
    KL | {"ref_update_interval": 2},
    KL | {"ref_update_interval": 4, "update_weights_interval": 2, "max_staleness": 1, "use_tis": True},
]


@pytest.mark.parametrize("options", LEGAL)
def test_legal_combinations_pass(topology: Write, options: dict[str, Any]) -> None:
    assert refusals(topology(**options)) == {}


REFUSED: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"num_rollout": None}, "--num-rollout", ["--num-epoch", "when the run ends"]),
    ({"run_name": "../../x"}, "--run-name", ["is no name", "letters, digits, dots, dashes and underscores"]),
    ({"run_name": "x" * 65}, "--run-name", ["is too long", "64"]),
    ({"global_batch_size": 3}, "--global-batch-size", ["4 prompts x 2 samples = 8", "2 or 4"]),
    ({"global_batch_size": 16}, "--global-batch-size", ["= 8 samples", "8"]),
    ({"num_steps_per_rollout": 3}, "--num-steps-per-rollout", ["which 3 steps do not divide", "2 or 4"]),
    (
        {"global_batch_size": 4, "num_steps_per_rollout": 4},
        "--global-batch-size",
        ["4 steps of 4 are 16", "--global-batch-size 2"],
    ),
    ({"max_staleness": 1, "rollout_lead": 2, "use_tis": True}, "--rollout-lead", ["--max-staleness is 1", "at most 1"]),
    ({"update_weights_interval": 2}, "--update-weights-interval", ["--max-staleness is too small", "at least 1"]),
    ({"partial_rollout": True}, "--partial-rollout", ["in lockstep", "--max-staleness to 1 or more"]),
    (
        {"max_staleness": 1, "use_tis": True, "mask_offpolicy_in_partial_rollout": True},
        "--mask-offpolicy-in-partial-rollout",
        ["cannot act", "Add --partial-rollout"],
    ),
    (
        {"max_staleness": 8, "update_weights_interval": 4, "use_tis": True},
        "--update-weights-interval",
        ["--rollout-lead is too small", "at least 3"],
    ),
    (
        {"max_staleness": 1},
        "--max-staleness",
        ["clipping cannot act", "--use-tis", "--use-rollout-logprobs", "--no-off-policy-correction"],
    ),
    ({"straggler_timeout": 0.0}, "--straggler-timeout", ["--rollout-lead 0", "that a group usually takes"]),
    (
        {"straggler_timeout": 0.0, "max_staleness": 2, "rollout_lead": 0, "use_tis": True},
        "--straggler-timeout",
        ["--rollout-lead 0"],
    ),
    ({"no_off_policy_correction": True}, "--no-off-policy-correction", ["in lockstep"]),
    (
        {"max_staleness": 1, "use_tis": True, "no_off_policy_correction": True},
        "--no-off-policy-correction",
        ["a correction is on"],
    ),
    (
        {"max_staleness": 1, "advantage_estimator": "m2po", "use_tis": True},
        "--max-staleness",
        ["--use-rollout-logprobs"],
    ),
    ({"min_lr": 1e-8}, "--min-lr", ["cannot act", "constant"]),
    ({"lr_decay_steps": 5}, "--lr-decay-steps", ["cannot act"]),
    ({"lr_decay_style": "linear", "min_lr": 1.0}, "--min-lr", ["is above --lr"]),
    (
        {"lr_decay_style": "linear", "num_rollout": None, "num_epoch": 2},
        "--lr-decay-style",
        ["where the decay ends", "--lr-decay-steps"],
    ),
    ({"lr_warmup_steps": 4}, "--lr-warmup-steps", ["4 optimizer steps", "below 4"]),
    ({"sequence_parallel": True}, "--sequence-parallel", ["--tensor-parallel-size is 1"]),
    ({"insecure": True}, "--insecure", ["cannot act"]),
    ({"controller": "host:5"}, "--controller", ["is no endpoint"]),
    ({"keys": "somewhere"}, "--keys", ["cannot act"]),
    ({"controller": "tcp://10.0.0.1:5755"}, "--keys", ["reachable from other hosts", "--keygen", "--insecure"]),
    ({"controller": "tcp://10.0.0.1:5755", "keys": "k", "insecure": True}, "--insecure", ["Keep one"]),
    ({"use_tis": True, "use_rollout_logprobs": True}, "--use-tis", ["Keep one"]),
    (
        {"lr_decay_style": "linear", "min_lr": 1e-7, "critic_lr": 1e-8} | PPO,
        "--min-lr",
        ["is above --critic-lr 1e-08"],
    ),
    ({"num_critic_only_steps": 4} | PPO, "--num-critic-only-steps", ["4 batches", "below --num-rollout 4"]),
    ({"num_critic_only_steps": 2, "lr_warmup_steps": 2} | PPO, "--lr-warmup-steps", ["2 optimizer steps"]),
    (
        {"ref_update_interval": 3, "update_weights_interval": 2, "max_staleness": 1, "use_tis": True} | KL,
        "--ref-update-interval",
        ["not published", "multiple of 2"],
    ),
    ({"ref_load": None} | {k: v for k, v in KL.items() if k != "ref_load"}, "--ref-load", ["needs a reference policy"]),
    ({"critic_lr": 1e-5}, "--critic-lr", ["has no critic"]),
    ({"ref_load": "ref"}, "--ref-load", ["nothing in this run compares with a reference"]),
]


@pytest.mark.parametrize(("options", "name", "told"), REFUSED)
def test_each_broken_rule_is_refused_alone_and_with_its_remedy(
    topology: Write, options: dict[str, Any], name: str, told: list[str]
) -> None:
    found = refusals(topology(**options))
    assert list(found) == [name]
    for words in told:
        assert words in found[name], found[name]


@pytest.mark.parametrize(
    ("services", "options", "told"),
    [
        ({"actor": {"ranks": 3}}, {"tensor_parallel_size": 2}, "multiple of 2"),
        ({"actor": {"ranks": 3}}, {}, "3 data-parallel ranks do not divide --global-batch-size 8"),
        ({"critic": {"ranks": 3, "tensor_parallel_size": 2}}, {"advantage_estimator": "ppo"}, "multiple of 2"),
        ({"critic": {"ranks": 3}}, {"advantage_estimator": "ppo"}, "3 data-parallel ranks do not divide"),
        ({"critic": {"sequence_parallel": True}}, {"advantage_estimator": "ppo"}, "tensor_parallel_size is 1 there"),
        ({"critic": {"expert_parallel_size": 2}}, {"advantage_estimator": "ppo"}, "mixture-of-experts"),
    ],
)
def test_services_that_do_not_fit_the_options(
    topology: Write, services: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    (found,) = refusals(topology(services=services, **options)).values()
    assert told in found and "topology.yaml:" in found


def test_all_violations_come_at_once_with_their_sources(topology: Write) -> None:
    file = topology(max_staleness=1, global_batch_size=3, sequence_parallel=True)
    with pytest.raises(ConfigError) as refused:
        load(["--lr-warmup-steps", "100"], file)
    sources = {violation.option: violation.source for violation in refused.value.violations}
    assert set(sources) == {"--max-staleness", "--global-batch-size", "--sequence-parallel", "--lr-warmup-steps"}
    assert sources.pop("--lr-warmup-steps") == "flag"
    assert all(source.startswith(str(file) + ":") for source in sources.values())


@pytest.mark.parametrize(("options", "role"), [(PPO, "critic"), (KL, "reference")])
def test_a_service_that_is_missing_or_has_nothing_to_do_is_refused(
    topology: Write, options: dict[str, Any], role: str
) -> None:
    found = refusals(topology(**(options | {"services": {}})))
    assert list(found) == [f"services.{role}"] and f"Add `{role}: {{}}`" in found[f"services.{role}"]
    found = refusals(topology(services={role: {}}))
    assert list(found) == [f"services.{role}"] and "no use for it" in found[f"services.{role}"]


def test_warnings_do_not_refuse(topology: Write) -> None:
    resolved = resolve({}, topology())
    assert not check_options(resolved)
    assert any("--eps-clip" in warning and "cannot act" in warning for warning in warnings(resolved))
