"""A run without a model: what it may be asked for, and what options of it cannot act."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax.config.checks import check_options, warnings
from relax.config.machine import check_machine
from relax.config.resolve import resolve
from relax.config.simulated import WITHOUT_A_MODEL

Write = Callable[..., Path]
SIMULATED: dict[str, Any] = {"rollout": {"engine": "simulated", "replicas": 2}, "actor": {"engine": "simulated"}}


def refusals(file: Path, **flags: Any) -> dict[str, str]:
    resolved = resolve(flags, file)
    assert not resolved.violations
    return {violation.option: str(violation) for violation in check_options(resolved)}


def test_a_simulated_run_needs_no_correction_and_warns_of_nothing(topology: Write) -> None:
    file = topology(services=SIMULATED, max_staleness=8, n_samples_per_prompt=1)
    assert refusals(file) == {}
    assert warnings(resolve({}, file)) == []


@pytest.mark.parametrize(
    ("services", "name", "told"),
    [
        ({"rollout": {"engine": "simulated"}}, "services.actor.engine", "made-up samples"),
        ({"actor": {"engine": "simulated"}}, "services.rollout.engine", "no model for it to load"),
        (
            SIMULATED | {"rollout": [{"engine": "simulated"}, {"engine": "vllm"}]},
            "services.rollout.engine",
            "no model for it to load",
        ),
        (SIMULATED | {"actor": {"engine": "simulated", "ranks": 2}}, "services.actor.ranks", "there is no model"),
        (
            SIMULATED | {"rollout": {"engine": "simulated", "replicas": 2, "devices": [0, 1]}},
            "services.rollout.devices",
            "= [0, 1] ",
        ),
        (SIMULATED | {"reference": {}}, "services.reference", "no use for it"),
    ],
)
def test_simulated_and_real_services_do_not_mix(
    topology: Write, services: dict[str, Any], name: str, told: str
) -> None:
    found = refusals(topology(services=services))
    assert list(found) == [name]
    assert told in found[name]


@pytest.mark.parametrize(
    "option",
    [
        {"sim_length": "constant:3"},
        {"sim_tokens_per_second": 10},
        {"sim_slots": 3},
        {"sim_train_seconds": 0},
        {"sim_publish_seconds": 0},
    ],
)
def test_options_of_the_simulation_are_refused_where_nothing_is_simulated(
    topology: Write, option: dict[str, Any]
) -> None:
    (name,) = option
    found = refusals(topology(**option))
    assert list(found) == ["--" + name.replace("_", "-")]
    assert "no engine of this topology is simulated" in next(iter(found.values()))
    assert refusals(topology(services=SIMULATED, **option)) == {}


@pytest.mark.parametrize("name", ["lr", "eps_clip", "use_tis", "rollout_temperature", "no_off_policy_correction"])
def test_options_of_the_model_are_refused_where_there_is_none(topology: Write, name: str) -> None:
    assert name in WITHOUT_A_MODEL
    value = True if name in ("use_tis", "no_off_policy_correction") else 0.5
    found = refusals(topology(services=SIMULATED, max_staleness=1, **{name: value}))
    flag = "--" + name.replace("_", "-")
    assert flag in found and "cannot act" in found[flag]


def test_what_cuts_a_batch_into_steps_acts_without_a_model_too(topology: Write) -> None:
    assert refusals(topology(services=SIMULATED, num_steps_per_rollout=2)) == {}


def test_the_credit_of_a_replica_follows_its_slots(topology: Write) -> None:
    options = resolve({}, topology(services=SIMULATED, sim_slots=16, n_samples_per_prompt=4)).options
    assert (options.sim_slots, options.rollout_credit) == (16, 4)
    options = resolve({}, topology(services=SIMULATED, rollout_max_num_seqs=32, n_samples_per_prompt=1)).options
    assert (options.sim_slots, options.rollout_credit) == (32, 32)


def test_slots_are_said_once(topology: Write) -> None:
    found = refusals(topology(services=SIMULATED, sim_slots=16, rollout_max_num_seqs=16))
    assert list(found) == ["--rollout-max-num-seqs"]


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"sim_length": "constant:x"}, "N is 'x'"),
        ({"sim_length": "file:/nowhere"}, "cannot be read"),
        ({"sim_tokens_per_second": "100,fast"}, "'fast' is no speed"),
        ({"sim_tokens_per_second": "100,200,300"}, "there are 2 replicas"),
    ],
)
def test_models_that_say_nothing_are_refused_before_the_start(
    topology: Write, option: dict[str, Any], told: str
) -> None:
    (violation,) = check_machine(resolve({}, topology(services=SIMULATED, **option)))
    assert violation.option == "--" + next(iter(option)).replace("_", "-")
    assert told in violation.problem and "topology.yaml:" in violation.source


def test_a_simulated_run_takes_only_the_tokenizer_of_the_checkpoint(topology: Write, checkpoint: Path) -> None:
    for file in checkpoint.glob("*.safetensors"):
        file.unlink()
    assert check_machine(resolve({}, topology(services=SIMULATED, rollout_max_response_len=100_000))) == []
    (checkpoint / "tokenizer.json").unlink()
    (violation,) = check_machine(resolve({}, topology(services=SIMULATED)))
    assert "has no tokenizer" in violation.problem
