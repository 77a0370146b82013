"""Command lines: every mistake at once, each with the nearest name."""

from pathlib import Path

import pytest

from relax.config.flags import FOREIGN, Parser
from relax.config.options import Options
from relax.config.violation import ConfigError


def parser() -> Parser:
    made = Parser("relax-launch", "test")
    made.add_argument("topology", type=Path)
    made.add_argument("--dry-run", action="store_true")
    return made


def test_options_and_own_arguments_are_kept_apart() -> None:
    given = parser().parse(["--lr", "1e-5", "a.yaml", "--use-tis", "--no-rm-exact", "--dry-run", "--seed=7"])
    assert given.options == {"lr": "1e-5", "use_tis": True, "rm_exact": False, "seed": "7"}
    assert given.own.topology == Path("a.yaml") and given.own.dry_run and not given.violations


@pytest.mark.parametrize("name", list(Options.model_fields))
def test_every_option_has_a_flag_in_the_help(name: str) -> None:
    text = parser().format_help()
    written = name.replace("_", "-")
    assert f"--{written}" in text or f"--[no-]{written}" in text


def test_a_misspelt_flag_is_refused_with_the_nearest_name_and_takes_its_value_along() -> None:
    given = parser().parse(["--rolout-batch-size", "8", "a.yaml", "--use-tiss", "--n_samples_per_prompt=2"])
    assert given.own.topology == Path("a.yaml") and given.options == {}
    assert [violation.option for violation in given.violations] == [
        "--rolout-batch-size",
        "--use-tiss",
        "--n_samples_per_prompt",
    ]
    assert [violation.fix for violation in given.violations] == [
        "Did you mean --rollout-batch-size?",
        "Did you mean --use-tis?",
        "Did you mean --n-samples-per-prompt?",
    ]
    assert given.suspects == {"rollout_batch_size", "use_tis", "n_samples_per_prompt"}


def test_a_flag_is_not_cut_short() -> None:
    given = parser().parse(["a.yaml", "--num-rollou", "3"])
    assert "num_rollout" not in given.options and given.violations[0].fix == "Did you mean --num-rollout?"


@pytest.mark.parametrize("name", list(FOREIGN))
def test_flags_of_other_engines_say_what_to_use_here(name: str) -> None:
    given = parser().parse([name, "a.yaml"])
    assert given.own.topology == Path("a.yaml")
    instead = "--context-parallel-size" if "context" in name else "--max-staleness"
    assert [(v.option, instead in v.fix) for v in given.violations] == [(name, True)]


def test_a_flag_without_its_value_is_refused() -> None:
    given = parser().parse(["a.yaml", "--lr", "--seed", "3"])
    assert given.options == {"seed": "3"} and given.suspects == {"lr"}
    assert "needs a value" in str(given.violations[0])


def test_negative_numbers_are_values() -> None:
    assert parser().parse(["a.yaml", "--lr", "-1e-3", "--rollout-top-k", "-1"]).options == {
        "lr": "-1e-3",
        "rollout_top_k": "-1",
    }


def test_a_missing_argument_does_not_hide_the_other_mistakes() -> None:
    with pytest.raises(ConfigError) as refused:
        parser().parse(["--sede", "3"])
    assert [violation.option for violation in refused.value.violations] == ["--sede", "command line"]
    assert "topology" in refused.value.violations[1].problem
