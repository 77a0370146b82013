"""Options of asynchrony, correction and simulation: where each cannot act it is refused (a ratio of 1: warned), and
there is a combination in which it acts.

The options are those that the sections declare: a new one without an entry fails.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relax.config.asynchrony import CONSTANT_FILTER
from relax.config.checks import check_options, warnings
from relax.config.fields import extra, flag
from relax.config.options import AsyncOptions, CorrectionOptions, Options, SimulationOptions
from relax.config.resolve import resolve

Write = Callable[..., Path]
Given = dict[str, Any]

SECTIONS = (AsyncOptions, CorrectionOptions, SimulationOptions)
ELSEWHERE = (
    "rollout_credit",
    "dynamic_sampling_filter_path",
    "use_rollout_logprobs",
    "true_on_policy_mode",
    "m2po_kl2_budget",
    "m2po_miniclip_low",
    "m2po_miniclip_high",
)
NAMES = [name for section in SECTIONS for name in section.__annotations__] + list(ELSEWHERE)

LEADLESS: Given = {"rollout_lead": 0, "straggler_timeout": 0.0}
SIMULATED: Given = {"services": {"rollout": {"engine": "simulated"}, "actor": {"engine": "simulated"}}}
STALE: Given = {"max_staleness": 2, "use_tis": True}
TIS: Given = {"use_tis": True}
RLOO: Given = {"advantage_estimator": "rloo", "calculate_per_token_loss": True}
M2PO: Given = {"advantage_estimator": "m2po"}
PPO: Given = {"advantage_estimator": "ppo", "services": {"critic": {}}}
OLD: Given = {"use_rollout_logprobs": True}
TWO_STEPS: Given = {"num_steps_per_rollout": 2}


@dataclass(frozen=True)
class Entry:
    """value: what the option is set to. acts: options with which it does, none of them refused. idle: options with
    which it is refused, and words of the refusal. warned: options with which it is legal, cannot act and is named by a
    warning. Cases may set the option to another value."""

    value: Any
    acts: Given
    idle: tuple[tuple[Given, str], ...] = ()
    warned: tuple[Given, ...] = ()


WITHOUT_A_MODEL = (SIMULATED, "the engines are simulated")
NOTHING_SIMULATED: tuple[Given, str] = ({}, "no engine of this topology is simulated")


def correction(value: Any, acts: Given, *idle: tuple[Given, str], warned: tuple[Given, ...] = ()) -> Entry:
    return Entry(value, acts, (*idle, WITHOUT_A_MODEL), warned)


TABLE: dict[str, Entry] = {
    "max_staleness": Entry(2, TIS, ((RLOO | TIS, "runs in lockstep"), (PPO | TIS, "runs in lockstep"))),
    "rollout_lead": Entry(1, STALE, (({}, "--max-staleness is 0"), ({"max_staleness": 0}, "leave it out"))),
    "update_weights_interval": Entry(2, STALE, (({}, "wait for ever"), (STALE | {"rollout_lead": 0}, "wait for ever"))),
    "no_off_policy_correction": Entry(
        True,
        {"max_staleness": 2},
        (
            ({}, "in lockstep there is nothing to correct"),
            (STALE, "a correction is on"),
            (OLD | {"max_staleness": 2}, "a correction is on"),
            (SIMULATED | {"max_staleness": 2}, "the engines are simulated"),
        ),
    ),
    "straggler_timeout": Entry(
        5.0,
        {},
        (
            ({"straggler_timeout": 0.0}, "waits for all of its groups"),
            (STALE | LEADLESS, "waits for all"),
            ({"stall_timeout": 5.0}, "ends the run before"),
        ),
    ),
    "partial_rollout": Entry(
        True, STALE, (({}, "in lockstep"), (RLOO, "needs it off"), (SIMULATED, "in lockstep every token"))
    ),
    "mask_offpolicy_in_partial_rollout": Entry(
        True, STALE | {"partial_rollout": True}, (({}, "no sample holds two versions"), (STALE, "cannot act"))
    ),
    "over_sampling_batch_size": Entry(
        6,
        {},
        (
            (STALE, "spare groups exist in lockstep alone"),
            ({"rollout_batch_size": 6}, "leaves no group to spare"),
            ({"rollout_batch_size": 8}, "leaves no group to spare"),
        ),
    ),
    "use_tis": correction(True, {}, (OLD, "so its weight is 1")),
    "tis_clip": correction(3.0, TIS, ({}, "no importance weight"), (OLD, "no importance weight")),
    "tis_clip_low": correction(
        0.5, TIS, ({}, "no importance weight"), (TIS | {"tis_clip": 0.4}, "is above --tis-clip")
    ),
    "tis_mode": correction(
        "icepop", TIS, ({}, "no importance weight"), (TIS | {"custom_tis_path": "my:weight"}, "takes its place")
    ),
    "custom_tis_path": correction("my:weight", TIS, ({}, "no importance weight"), (OLD, "no importance weight")),
    "use_opsm": correction(True, TWO_STEPS, warned=({}, {"true_on_policy_mode": True}, M2PO | OLD)),
    "opsm_delta": correction(
        0.1, TWO_STEPS | {"use_opsm": True}, (TWO_STEPS, "no sequence is masked"), warned=({"use_opsm": True},)
    ),
    "use_rollout_logprobs": correction(
        True,
        {},
        (RLOO, "compares with no old log-probs"),
        ({"true_on_policy_mode": True}, "the current log-probs are the proximal ones"),
    ),
    "true_on_policy_mode": correction(
        True,
        {},
        (STALE, "holds only in lockstep"),
        (TWO_STEPS, "one optimizer step per rollout"),
        (RLOO, "compares with no old log-probs"),
    ),
    **{
        name: correction(0.02, M2PO | OLD, ({}, "grpo has no place for it"), warned=(M2PO, *more))
        for name, more in {
            "m2po_kl2_budget": (),
            "m2po_miniclip_low": (M2PO | OLD,),
            "m2po_miniclip_high": (),
        }.items()
    },
    "sim_length": Entry("constant:3", SIMULATED, (NOTHING_SIMULATED,)),
    "sim_tokens_per_second": Entry("10", SIMULATED, (NOTHING_SIMULATED,)),
    "sim_slots": Entry(3, SIMULATED, (NOTHING_SIMULATED,)),
    "sim_train_seconds": Entry(0.5, SIMULATED, (NOTHING_SIMULATED,)),
    "sim_publish_seconds": Entry(0.5, SIMULATED, (NOTHING_SIMULATED,)),
    "rollout_credit": Entry(2, STALE, (({}, "its whole share of a batch at once"), (SIMULATED, "in lockstep"))),
    "dynamic_sampling_filter_path": Entry(
        CONSTANT_FILTER, {}, (({"n_samples_per_prompt": 1, "advantage_estimator": "m2po"}, "no group could pass it"),)
    ),
}
# The tests' verifier pays 0 or 1, so advantages of raw rewards are never negative; this one may pay anything.
ANY_REWARD: Given = {"rm_type": None, "custom_rm_path": "my:reward"}


def options_of(name: str, given: Given) -> Given:
    return {**given, name: TABLE[name].value} if name not in given else given


def found(file: Path) -> dict[str, str]:
    resolved = resolve({}, file)
    assert not resolved.violations, [str(violation) for violation in resolved.violations]
    return {violation.option: str(violation) for violation in check_options(resolved)}


def warned(file: Path) -> set[str]:
    """The options that a warning says cannot act."""
    lines = [line.partition(" cannot act")[0] for line in warnings(resolve({}, file)) if " cannot act" in line]
    return {name for line in lines for name in line.rpartition(" and ")[2].split(", ")}


def built(names: list[str]) -> list[str]:
    return [name for name in names if not extra(Options.model_fields[name]).unavailable]


IDLE = [pytest.param(n, *case, id=f"{n}-{i}") for n in built(list(TABLE)) for i, case in enumerate(TABLE[n].idle)]
WARNED = [pytest.param(n, case, id=f"{n}-{i}") for n in built(list(TABLE)) for i, case in enumerate(TABLE[n].warned)]


def test_every_option_has_an_entry() -> None:
    assert set(TABLE) == set(NAMES)
    for name, entry in TABLE.items():
        assert entry.idle or entry.warned, name


@pytest.mark.parametrize("name", built(list(TABLE)))
def test_the_option_is_accepted_where_it_acts(topology: Write, name: str) -> None:
    file = topology(**ANY_REWARD, **options_of(name, TABLE[name].acts))
    assert found(file) == {}
    assert flag(name) not in warned(file)


@pytest.mark.parametrize(("name", "given", "told"), IDLE)
def test_the_option_is_refused_where_it_cannot_act(topology: Write, name: str, given: Given, told: str) -> None:
    without = found(topology(**{option: value for option, value in given.items() if option != name}))
    refused = found(topology(**options_of(name, given)))
    assert told in refused[flag(name)], refused
    # The refusal is the option's, and is the only one that it brings.
    assert flag(name) not in without
    assert set(refused) - set(without) == {flag(name)}


@pytest.mark.parametrize(("name", "given"), WARNED)
def test_the_option_is_warned_about_where_its_ratio_cannot_move(topology: Write, name: str, given: Given) -> None:
    file = topology(**options_of(name, given))
    assert found(file) == {}
    assert flag(name) in warned(file)
