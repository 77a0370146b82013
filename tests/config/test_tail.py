"""The last batch of a run that ends by --num-epoch, for algorithms that train whole batches only."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax.config import tail
from relax.config.machine import check_machine
from relax.config.resolve import resolve
from relax.config.tail import check_tail, planned_batches

Write = Callable[..., Path]
# 20 prompts, batches of 4: see conftest.
RLOO = {"advantage_estimator": "rloo", "calculate_per_token_loss": True, "num_rollout": None, "num_epoch": 1}


def refusals(file: Path, **flags: Any) -> list[str]:
    resolved = resolve(flags, file)
    assert not resolved.violations
    return [str(violation) for violation in check_machine(resolved)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rollout_batch_size": 20},
        {"rollout_batch_size": 8, "num_epoch": 2},  # 40 prompts: a batch may hold the end of one pass and more
        {"rollout_batch_size": 8, "num_rollout": 2},  # ends before the short batch
        {"rollout_batch_size": 8, "advantage_estimator": "grpo", "calculate_per_token_loss": None},
        {"rollout_batch_size": 8, "num_epoch": None, "num_rollout": 9},  # as many passes as it takes
        {"overlong_prompts": "filter", "num_epoch": None, "num_rollout": 9},
    ],
)
def test_whole_batches_pass(topology: Write, options: dict[str, Any]) -> None:
    assert refusals(topology(**{**RLOO, **options})) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"rollout_batch_size": 8},
            "1 pass over 20 prompts are 20, and batches of 8 would leave 4 for the last one. "
            "Set --rollout-batch-size 5 or 10; or --num-rollout 2, which ends before the short batch.",
        ),
        ({"rollout_batch_size": 8, "num_rollout": 3}, "or --num-rollout 2,"),
        ({"rollout_batch_size": 8, "num_epoch": 3}, "3 passes over 20 prompts are 60, and batches of 8 would leave 4"),
        ({"rollout_batch_size": 8, "num_epoch": 3}, "Set --rollout-batch-size 6 or 10; or --num-rollout 7,"),
        ({"rollout_batch_size": 64}, "would leave 20 for the last one. Set --rollout-batch-size 20."),
        ({"prompt_data": "reasoning_gym:spell_backward?size=7", "label_key": None}, "1 pass over 7 prompts"),
        ({"overlong_prompts": "filter"}, "End the run with --num-rollout alone, or set --overlong-prompts refuse."),
    ],
)
def test_short_last_batch_is_refused_with_the_nearest_sizes_that_fit(
    topology: Write, options: dict[str, Any], told: str
) -> None:
    if "prompt_data" in options:
        options = {**options, "rm_type": "reasoning_gym"}
    file = topology(**{**RLOO, **options})
    (found,) = refusals(file)
    assert found.startswith("--num-epoch = ") and "topology.yaml:" in found and told in found, found


def test_length_of_a_generated_dataset_is_its_tasks_own_when_none_is_given(topology: Write) -> None:
    flags = {"prompt_data": "reasoning_gym:spell_backward", "rm_type": "reasoning_gym", "rollout_batch_size": "64"}
    (found,) = refusals(topology(**{**RLOO, "label_key": None}), **flags)
    assert "1 pass over 500 prompts" in found


def test_dataset_that_cannot_be_read_is_refused_once(topology: Write, prompts: Path) -> None:
    file = topology(**RLOO, rollout_batch_size=8)
    prompts.write_text("")
    (found,) = refusals(file)
    assert found.startswith("--prompt-data")


def test_nothing_follows_from_a_size_that_is_refused_itself(topology: Write) -> None:
    resolved = resolve({"rollout_batch_size": "many"}, topology(**RLOO))
    assert check_machine(resolved) == []


@pytest.mark.parametrize(("total", "size", "near"), [(12, 5, [4, 6]), (7, 3, [1, 7]), (7, 9, [7]), (1, 2, [1])])
def test_nearest_sizes_are_divisors(total: int, size: int, near: list[int]) -> None:
    assert tail._nearest_divisors(total, size) == near


def test_the_check_imports_no_torch_and_no_reasoning_gym(topology: Write) -> None:
    file = topology(**{**RLOO, "label_key": None}, prompt_data="reasoning_gym:spell_backward?size=7")
    code = (
        "import json, sys; from pathlib import Path; from relax.config.resolve import resolve; "
        f"from relax.config.tail import check_tail; found = check_tail(resolve({{}}, Path({str(file)!r})).options); "
        "print(json.dumps([len(found), 'torch' in sys.modules, 'reasoning_gym' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [1, False, False]
    assert check_tail(resolve({}, file).options)


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"num_rollout": 10}, 10),
        ({"num_rollout": 10, "num_epoch": 1}, 5),
        ({"num_rollout": 10, "num_epoch": 1, "rollout_batch_size": 20}, 1),
        ({"num_rollout": 2, "num_epoch": 1}, 2),
        ({"num_rollout": None, "num_epoch": 3, "rollout_batch_size": 8}, 8),
        ({"num_rollout": 10, "num_epoch": 1, "overlong_prompts": "filter"}, None),
        ({"num_rollout": 10, "overlong_prompts": "filter"}, 10),
        ({"num_epoch": 1, "num_rollout": None, "prompt_data": "reasoning_gym:spell_backward?size=9"}, 3),
        ({"num_epoch": 1, "num_rollout": None, "prompt_data": "reasoning_gym:spell_backward"}, 125),
        ({"num_epoch": 1, "prompt_data": "/on/another/host.jsonl"}, None),
    ],
)
def test_planned_batches_are_those_of_the_earlier_end(
    topology: Write, options: dict[str, Any], batches: int | None
) -> None:
    assert planned_batches(resolve({}, topology(**options)).options) == batches


def test_who_has_the_dataset_open_tells_its_size(topology: Write) -> None:
    options = resolve({}, topology(num_rollout=10, num_epoch=2, prompt_data="/on/another/host.jsonl")).options
    assert planned_batches(options, prompts=9) == 5
    filtered = options.model_copy(update={"overlong_prompts": "filter"})
    assert planned_batches(filtered, prompts=9) is None, "how many of them are left out is not known"
