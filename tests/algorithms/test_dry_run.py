"""`relax-launch --dry-run` says of every line of a contract what breaks it and which flag mends it, and exits with 2.

Each case is the algorithm's own example with a few flags more. The launcher's `main` runs in this process, so that a
case takes milliseconds.
"""

import re
from pathlib import Path

import pytest
import yaml

from relax.config.flags import FOREIGN
from relax.launch.cli import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "algorithms"
HOOK = "--custom-reward-post-process-path tests.algorithms.test_hooks:centred_over_the_batch"

# algorithm -> (flags that break one line, {option refused: what its fix says})
LINES: dict[str, list[tuple[str, dict[str, str]]]] = {
    "rloo": [
        ("--n-samples-per-prompt 1", {"--n-samples-per-prompt": "Set --n-samples-per-prompt 2 or more."}),
        (
            "--global-batch-size 32",
            {
                "--global-batch-size": "Set --global-batch-size 64, or leave it out.",
                "--num-steps-per-rollout": "Leave --num-steps-per-rollout out, or set it to 1.",
            },
        ),
        (
            "--num-steps-per-rollout 2",
            {
                "--global-batch-size": "Set --global-batch-size 64, or leave it out.",
                "--num-steps-per-rollout": "Leave --num-steps-per-rollout out, or set it to 1.",
            },
        ),
        ("--global-batch-size 5", {"--global-batch-size": "Set --global-batch-size 64", "--num-steps-per-rollout": ""}),
        ("--no-calculate-per-token-loss", {"--calculate-per-token-loss": "Add --calculate-per-token-loss."}),
        ("--kl-coef 0.1", {"--kl-coef": "Use --use-kl-loss with --kl-loss-coef."}),
        ("--max-staleness 1", {"--max-staleness": "Set --max-staleness 0."}),
        ("--max-staleness 1 --use-tis", {"--max-staleness": "Set --max-staleness 0."}),
        ("--disable-rewards-normalization", {"--disable-rewards-normalization": "Leave --disable-rewards-"}),
        ("--normalize-advantages", {"--normalize-advantages": "Leave --normalize-advantages out."}),
        ("--partial-rollout", {"--partial-rollout": "Leave --partial-rollout out"}),
        (
            "--num-epoch 1 --num-rollout none --rollout-batch-size 6",
            {"--num-epoch": "Set --rollout-batch-size 5 or 10"},
        ),
    ],
    "ppo": [
        ("--max-staleness 1", {"--max-staleness": "Set --max-staleness 0."}),
        ("--kl-coef 0.1", {"--kl-coef": "Set --kl-coef 0."}),
        (
            "--use-kl-loss --kl-loss-coef 0.1 --ref-load topologies/tiny",
            {"--use-kl-loss": "Leave --use-kl-loss out.", "services.reference": "Add `reference: {}` to services."},
        ),
    ],
    "m2po": [
        ("--context-parallel-size 2", {"--context-parallel-size": "Set --context-parallel-size 1."}),
        ("--dynamic-context-parallel", {"--dynamic-context-parallel": "--context-parallel-size"}),
        (
            "--no-use-rollout-logprobs",
            {"--max-staleness": "Add --use-rollout-logprobs, or set --max-staleness 0."},
        ),
        (
            "--no-use-rollout-logprobs --use-tis",
            {"--max-staleness": "Add --use-rollout-logprobs, or set --max-staleness 0."},
        ),
        ("--eps-clip 0.2", {"--eps-clip": "Leave it out; it acts with grpo"}),
        ("--eps-clip-high 0.3", {"--eps-clip-high": "Leave it out; it acts with grpo"}),
        ("--eps-clip-c 3", {"--eps-clip-c": "Leave it out; it acts with grpo"}),
    ],
    "reinforce_plus_plus": [
        ("--no-normalize-advantages", {"--normalize-advantages": "Add --normalize-advantages."}),
        ("--kl-coef 0", {"--kl-coef": "Set --kl-coef above 0, e.g. 0.01, and --ref-load."}),
        ("--ref-load none", {"--ref-load": "Set --ref-load to a checkpoint."}),
        ("--use-kl-loss --kl-loss-coef 0.1", {"--use-kl-loss": "Leave --use-kl-loss out."}),
        ("--context-parallel-size 2", {"--context-parallel-size": "Set --context-parallel-size 1."}),
        ("--calculate-per-token-loss", {"--calculate-per-token-loss": "Leave --calculate-per-token-loss out."}),
    ],
    "reinforce_plus_plus_baseline": [
        ("--n-samples-per-prompt 1", {"--n-samples-per-prompt": "Set --n-samples-per-prompt 2 or more."}),
        ("--no-normalize-advantages", {"--normalize-advantages": "Add --normalize-advantages."}),
        ("--kl-coef 0.1", {"--kl-coef": "Set --kl-coef 0 and use --use-kl-loss."}),
        (
            "--no-use-kl-loss",
            {
                "--use-kl-loss": "Add --use-kl-loss.",
                # The example sets all of these, and without the KL they have nothing to act on.
                "--kl-loss-type": "Add --use-kl-loss",
                "--kl-loss-coef": "Add --use-kl-loss",
                "--ref-load": "Add --use-kl-loss",
                "services.reference": "Remove it.",
            },
        ),
        ("--kl-loss-type k3", {"--kl-loss-type": "Set --kl-loss-type k2."}),
        ("--kl-loss-coef 0", {"--kl-loss-coef": "Set --kl-loss-coef above 0, e.g. 0.001, and --ref-load."}),
        ("--ref-load none", {"--ref-load": "Set --ref-load to a checkpoint."}),
        ("--disable-rewards-normalization", {"--disable-rewards-normalization": "Leave --disable-rewards-"}),
        (HOOK, {"--custom-reward-post-process-path": "Leave it out."}),
        ("--context-parallel-size 2", {"--context-parallel-size": "Set --context-parallel-size 1."}),
        ("--calculate-per-token-loss", {"--calculate-per-token-loss": "Leave --calculate-per-token-loss out."}),
    ],
}
ONE_BY_ONE = [pytest.param(name, *line, id=f"{name} {line[0]}") for name, lines in LINES.items() for line in lines]


@pytest.fixture
def dry_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """(topology, flags) -> (exit code, {option refused: the line that says so})"""
    monkeypatch.chdir(ROOT)

    def run(topology: Path, flags: str = "") -> tuple[int, dict[str, str]]:
        capsys.readouterr()
        code = main([str(topology), "--dry-run", *flags.split()])
        told = capsys.readouterr()
        lines = re.findall(r"^  - (\S+) = (.*)$", told.err, re.MULTILINE)
        assert told.err.endswith("Nothing was started.\n") or "Nothing was started." in told.out
        assert len(dict(lines)) == len(lines), "an option is refused once"
        return code, dict(lines)

    return run


def options_of(name: str) -> dict[str, object]:
    return yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())["options"]


@pytest.mark.parametrize("name", LINES)
def test_legal_set_passes(dry_run, name: str) -> None:
    assert options_of(name)["advantage_estimator"] == name
    assert dry_run(EXAMPLES / f"{name}.yaml") == (0, {})


@pytest.mark.parametrize(("name", "flags", "refused"), ONE_BY_ONE)
def test_each_line_broken_alone_is_refused_with_its_flag_and_fix(
    dry_run, name: str, flags: str, refused: dict[str, str]
) -> None:
    code, told = dry_run(EXAMPLES / f"{name}.yaml", flags)
    assert code == 2 and told.keys() == refused.keys(), told
    for option, fix in refused.items():
        assert fix in told[option], told[option]


# The options that stay silent in the second place have nothing left to be broken against: without a KL loss its
# settings are idle, and there is no reference to be loaded.
TOGETHER = {
    "rloo": (
        "--n-samples-per-prompt 1 --global-batch-size 3 --num-steps-per-rollout 2 --no-calculate-per-token-loss "
        "--kl-coef 0.1 --max-staleness 1 --disable-rewards-normalization --normalize-advantages --partial-rollout "
        "--num-epoch 1 --num-rollout none --rollout-batch-size 6",
        set(),
    ),
    "ppo": ("--max-staleness 1 --kl-coef 0.1 --use-kl-loss --ref-load topologies/tiny", set()),
    "m2po": (
        "--context-parallel-size 2 --dynamic-context-parallel --no-use-rollout-logprobs --eps-clip 0.2 "
        "--eps-clip-high 0.3 --eps-clip-c 3",
        set(),
    ),
    "reinforce_plus_plus": (
        "--no-normalize-advantages --kl-coef 0 --ref-load none --use-kl-loss --context-parallel-size 2 "
        "--calculate-per-token-loss",
        set(),
    ),
    "reinforce_plus_plus_baseline": (
        "--n-samples-per-prompt 1 --no-normalize-advantages --kl-coef 0.1 --no-use-kl-loss --kl-loss-type k3 "
        f"--kl-loss-coef 0 --ref-load none --disable-rewards-normalization {HOOK} --context-parallel-size 2 "
        "--calculate-per-token-loss",
        {"--ref-load"},
    ),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_all_lines_broken_together_are_all_refused_at_once(dry_run, name: str) -> None:
    flags, silent = TOGETHER[name]
    code, told = dry_run(EXAMPLES / f"{name}.yaml", flags)
    expected = {option for _, refused in LINES[name] for option in refused}
    assert code == 2 and expected - silent <= told.keys(), expected - silent - told.keys()


@pytest.mark.parametrize(
    ("name", "role"), [("ppo", "critic"), ("reinforce_plus_plus", "reference"), ("cispo", "reference")]
)
def test_service_that_an_algorithm_needs_must_be_in_the_topology(dry_run, tmp_path: Path, name: str, role: str) -> None:
    document = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    del document["services"][role]
    file = tmp_path / "without.yaml"
    file.write_text(yaml.safe_dump(document))
    code, told = dry_run(file)
    assert code == 2 and told.keys() == {f"services.{role}"}
    assert f"Add `{role}: {{}}` to services." in told[f"services.{role}"]


def test_ppo_whitens_only_when_asked(dry_run) -> None:
    assert "normalize_advantages" not in options_of("ppo")
    assert dry_run(EXAMPLES / "ppo.yaml", "--normalize-advantages") == (0, {})


@pytest.mark.parametrize(
    ("name", "flags", "option"),
    [
        ("grpo", "--kl-coef 0.1", "--kl-coef"),
        ("gspo", "--eps-clip-c 3", "--eps-clip-c"),
        ("cispo", "--eps-clip-c 3", "--eps-clip-c"),
        ("sapo", "--eps-clip-c 3", "--eps-clip-c"),
    ],
)
def test_option_that_an_estimator_has_no_place_for_is_refused(dry_run, name: str, flags: str, option: str) -> None:
    code, told = dry_run(EXAMPLES / f"{name}.yaml", flags)
    assert code == 2 and told.keys() == {option}


@pytest.mark.parametrize("foreign", [name for name in FOREIGN if "context" not in name])
def test_modes_of_other_engines_are_recognised_and_refused_as_flag_and_as_option(
    dry_run, tmp_path: Path, foreign: str
) -> None:
    code, told = dry_run(EXAMPLES / "grpo.yaml", foreign)
    assert code == 2 and told.keys() == {foreign} and "Set --max-staleness" in told[foreign]
    document = yaml.safe_load((EXAMPLES / "grpo.yaml").read_text())
    key = foreign[2:].replace("-", "_")
    document["options"][key] = True
    file = tmp_path / "foreign.yaml"
    file.write_text(yaml.safe_dump(document))
    code, told = dry_run(file)
    assert code == 2 and told.keys() == {f"options.{key}"} and "Set --max-staleness" in told[f"options.{key}"]


def test_hook_that_cannot_be_imported_is_refused_with_the_reason(dry_run) -> None:
    code, told = dry_run(EXAMPLES / "grpo.yaml", "--custom-loss-path no_such_module:loss")
    assert code == 2 and "there is no module 'no_such_module'" in told["--custom-loss-path"]


def test_ratio_that_cannot_act_is_a_warning_and_no_refusal(monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    assert main([str(EXAMPLES / "grpo.yaml"), "--dry-run", "--num-steps-per-rollout", "1"]) == 0
    (warning,) = re.findall("^warning: .*$", capsys.readouterr().err, re.MULTILINE)
    for name in ("--eps-clip,", "--eps-clip-high", "--use-rollout-logprobs", "--num-steps-per-rollout"):
        assert name in warning
