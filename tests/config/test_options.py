"""The table of options: complete, derived where it says so, and refusing what it does not know."""

import re
import subprocess
import sys

import pytest
from pydantic import ValidationError

from relax.config.derive import derived_values
from relax.config.fields import extra, flag
from relax.config.options import DERIVED, SECTIONS, Options


def test_every_option_has_one_section_and_a_line_of_help() -> None:
    declared = [name for section in SECTIONS for name in section.__annotations__ if name != "model_config"]
    assert sorted(declared) == sorted(Options.model_fields) and len(declared) == len(set(declared))
    for name, field in Options.model_fields.items():
        assert field.description and "\n" not in field.description, name


SPECIFIED = """
    --advantage-estimator --eps-clip --eps-clip-high --eps-clip-c --value-clip --clip-grad --gamma --lambd --kl-coef
    --use-kl-loss --kl-loss-coef --kl-loss-type --use-unbiased-kl --ref-load --ref-update-interval --entropy-coef
    --normalize-advantages --disable-grpo-std-normalization --disable-rewards-normalization --calculate-per-token-loss
    --sapo-tau-pos --sapo-tau-neg --m2po-kl2-budget --m2po-miniclip-low --m2po-miniclip-high --use-rollout-logprobs
    --use-tis --tis-clip --tis-clip-low --tis-mode --use-opsm --opsm-delta --true-on-policy-mode
    --num-critic-only-steps --critic-lr --max-staleness --rollout-lead --no-off-policy-correction --straggler-timeout
    --rollout-batch-size --n-samples-per-prompt --global-batch-size --num-steps-per-rollout --num-rollout --num-epoch
    --hf-checkpoint --prompt-data --input-key --label-key --rm-type --rollout-max-response-len --rollout-temperature
    --lr --seed --run-dir --run-name --controller --resume --load --save --save-interval --keep-checkpoints
    --restart-budget --peer-timeout --stall-timeout --rollout-credit --partial-rollout --over-sampling-batch-size
    --update-weights-interval --tensor-parallel-size --pipeline-parallel-size --context-parallel-size
    --sequence-parallel --expert-parallel-size --sim-length --sim-tokens-per-second --sim-slots --sim-train-seconds
    --sim-publish-seconds --mask-offpolicy-in-partial-rollout --apply-chat-template --rm-exact --custom-rm-path
"""


def test_flags_of_the_specification_exist() -> None:
    flags = re.findall("--[a-z0-9-]+", SPECIFIED)
    assert not set(flags) - {flag(name) for name in Options.model_fields}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rollout_batch_size": 4, "n_samples_per_prompt": 2}, {"global_batch_size": 8, "num_steps_per_rollout": 1}),
        ({"rollout_batch_size": 4, "n_samples_per_prompt": 2, "num_steps_per_rollout": 4}, {"global_batch_size": 2}),
        ({"rollout_batch_size": 4, "n_samples_per_prompt": 2, "global_batch_size": 4}, {"num_steps_per_rollout": 2}),
        ({"max_staleness": 0}, {"rollout_lead": 0}),
        ({"max_staleness": 1}, {"rollout_lead": 1}),
        ({"max_staleness": 16}, {"rollout_lead": 2}),
        ({"max_staleness": 16, "rollout_lead": 16}, {"rollout_lead": 16}),
        ({"eps_clip": 0.3}, {"eps_clip_high": 0.3}),
        ({"eps_clip": 0.3, "eps_clip_high": 0.5}, {"eps_clip_high": 0.5}),
        ({"lr": 1e-3}, {"critic_lr": 1e-3}),
        ({"num_rollout": 10, "num_steps_per_rollout": 2, "global_batch_size": 128}, {"lr_decay_steps": 20}),
        ({"num_epoch": 1}, {"lr_decay_steps": None}),
        ({"rollout_max_num_seqs": 30, "n_samples_per_prompt": 8}, {"rollout_credit": 3}),
        ({"rollout_max_num_seqs": 4, "n_samples_per_prompt": 8}, {"rollout_credit": 1}),
    ],
)
def test_derived_values(given: dict[str, object], expected: dict[str, object]) -> None:
    options = Options(**given)
    assert {name: getattr(options, name) for name in expected} == expected


def test_values_as_typed_derive_the_same() -> None:
    assert Options(rollout_batch_size="4", n_samples_per_prompt="2").global_batch_size == 8  # type: ignore[arg-type]


def test_options_marked_as_derived_are_those_that_are_computed() -> None:
    assert {name for name, field in Options.model_fields.items() if extra(field).derived} == DERIVED
    assert not derived_values(dict.fromkeys(Options.model_fields, 1), lambda name: 1)


def test_a_derived_value_does_not_count_as_set() -> None:
    options = Options(eps_clip=0.2)
    assert options.is_set("eps_clip") and not options.is_set("eps_clip_high") and not options.is_set("lr")


@pytest.mark.parametrize(
    "given",
    [
        {"rollout_batch_sise": 4},
        {"rollout_batch_size": 0},
        {"rollout_batch_size": "four"},
        {"global_batch_size": 0},
        {"rollout_temperature": 0.0},
        {"rollout_top_p": 1.5},
        {"lr": "nan"},
        {"lr": float("inf")},
        {"advantage_estimator": "gpro"},
    ],
)
def test_unknown_names_and_values_out_of_range_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Options(**given)


def test_options_do_not_change() -> None:
    with pytest.raises(ValidationError):
        Options().lr = 1.0  # type: ignore[misc]


def test_configuration_imports_no_torch() -> None:
    code = (
        "import sys; import relax.config, relax.config.checks, relax.config.machine, relax.launch.cli, relax.logs.cli; "
        "from relax.config import checks, machine; import relax.algorithms.contracts, relax.data.checks; "
        "heavy = {'torch', 'vllm', 'megatron', 'transformers'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
