"""Flags over topology over defaults, each value with its source, every fault in one message."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from command_line import load

from relax.config import ConfigError, Options
from relax.config.fields import extra
from relax.config.resolve import resolve

Write = Callable[..., Path]


def test_flags_win_over_the_topology_and_sources_are_remembered(topology: Write) -> None:
    file = topology(lr=0.5, seed=3)
    resolved = load(["--lr", "1e-5"], file)
    assert resolved.options.lr == 1e-5 and resolved.sources["lr"] == "flag"
    assert resolved.options.seed == 3
    line = 1 + file.read_text().splitlines().index("  seed: 3")
    assert resolved.sources["seed"] == f"{file}:{line}"
    assert resolved.options.run_name == "t" and "run.name" in resolved.sources["run_name"]
    assert resolved.sources["global_batch_size"] == "derived" and resolved.sources["gamma"] == "default"
    assert set(resolved.sources) == set(Options.model_fields)


def test_parallel_sizes_of_the_actor_are_options(topology: Write) -> None:
    resolved = load([], topology(services={"actor": {"ranks": 2, "tensor_parallel_size": 2}}))
    assert resolved.options.tensor_parallel_size == 2 and ":" in resolved.sources["tensor_parallel_size"]


def test_types_of_yaml_that_surprise(topology: Write) -> None:
    resolved = load(["--rollout-lead", "1"], topology(lr="1e-5", run_name=7, max_staleness="1", use_tis=True))
    assert (resolved.options.lr, resolved.options.run_name, resolved.options.max_staleness) == (1e-5, "7", 1)


def test_none_clears_an_option_of_the_topology(topology: Write) -> None:
    file = topology(num_epoch=1)
    assert load(["--num-epoch", "none"], file).options.num_epoch is None
    with pytest.raises(ConfigError, match="--lr"):
        load(["--lr", "none"], file)


def test_every_fault_is_in_one_message(topology: Write) -> None:
    file = topology(rollout_batch_sise=8, lr="fast", seed=True, advantage_estimator="gpro", hf_checkpoint=None)
    with pytest.raises(ConfigError) as refused:
        load(["--rollout-temperature", "0", "--max-stalenes", "1", "--n-samples-per-prompt", "2.5"], file)
    told = {violation.option: violation for violation in refused.value.violations}
    assert set(told) == {
        "options.rollout_batch_sise",
        "--lr",
        "--seed",
        "--advantage-estimator",
        "--hf-checkpoint",
        "--rollout-temperature",
        "--max-stalenes",
        "--n-samples-per-prompt",
    }
    assert told["options.rollout_batch_sise"].fix == "Did you mean rollout-batch-size?"
    assert told["--lr"].source.startswith(str(file)) and told["--rollout-temperature"].source == "flag"
    assert "grpo, gspo" in told["--advantage-estimator"].fix and "above 0" in told["--rollout-temperature"].fix


def test_a_refused_value_is_not_blamed_twice(topology: Write) -> None:
    """The stand-in of a misspelt batch size must not be reported as one that does not divide."""
    file = topology(rollout_batch_size=None, rollout_batch_sise=3, global_batch_size=6)
    with pytest.raises(ConfigError) as refused:
        load([], file)
    assert [violation.option for violation in refused.value.violations] == ["options.rollout_batch_sise"]


@pytest.mark.parametrize("name", [n for n, field in Options.model_fields.items() if extra(field).unavailable])
def test_an_option_that_is_not_built_yet_is_refused_never_ignored(topology: Write, name: str) -> None:
    special = {"kl_loss_type": "k2"}
    value = special.get(name, True if Options.model_fields[name].annotation is bool else "3")
    resolved = resolve({name: value}, topology())
    assert any("not available yet" in str(v) and v.fix for v in resolved.violations), resolved.violations


def test_an_option_that_is_not_built_yet_may_stand_at_its_default(topology: Write) -> None:
    assert not resolve({"save": True, "partial_rollout": False}, topology()).violations


def test_config_yaml_holds_what_was_resolved(topology: Write) -> None:
    resolved = load(["--lr", "1e-5"], topology())
    text = resolved.config_yaml()
    values = yaml.safe_load(text)
    assert values["lr"] == 1e-5 and values["global_batch_size"] == 8 and values["advantage_estimator"] == "grpo"
    assert "eval_interval" not in values
    (line,) = (line for line in text.splitlines() if line.startswith("lr:"))
    assert line.endswith("# flag")


def test_config_yaml_can_be_read_back_as_options(topology: Write) -> None:
    resolved = load([], topology(rm_type=None, custom_rm_path="a:b # c"))
    assert Options(**yaml.safe_load(resolved.config_yaml())) == resolved.options


def test_without_a_topology_flags_alone_decide() -> None:
    resolved = load(["--hf-checkpoint", "m", "--prompt-data", "p", "--num-rollout", "3"], None)
    assert resolved.topology is None and resolved.options.num_rollout == 3
