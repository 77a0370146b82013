import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax.data import check


@pytest.fixture
def options(tmp_path: Path, checkpoint: Path) -> SimpleNamespace:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": i + 1}) + "\n" for i in range(5)))
    return SimpleNamespace(
        prompt_data=str(path),
        input_key="prompt",
        label_key="answer",
        apply_chat_template=False,
        rollout_max_prompt_len=16,
        overlong_prompts="refuse",
        rm_type="exact_match",
        custom_rm_path=None,
        hf_checkpoint=str(checkpoint),
        seed=1,
    )


def test_usable_data_has_no_violation(options: SimpleNamespace) -> None:
    assert check(options) == []
    options.apply_chat_template = True
    assert check(options) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"input_key": "promt"},
            r"--input-key = 'promt': no row .*Did you mean 'prompt'\? The rows have: answer, prompt",
        ),
        ({"label_key": "label"}, r"--label-key = 'label': no row of .* has this field.*The rows have: answer, prompt"),
        (
            {"rollout_max_prompt_len": 4},
            r"--rollout-max-prompt-len = 4: .*line 1 has 5 tokens.*--overlong-prompts filter",
        ),
        ({"rollout_max_prompt_len": 4, "overlong_prompts": "filter"}, "all 5 prompts are longer"),
        ({"prompt_data": "/nowhere/p.jsonl"}, "--prompt-data = '/nowhere/p.jsonl': .*no such file"),
        ({"prompt_data": "reasoning_gym:nonsense"}, "has no task 'nonsense'"),
        ({"prompt_data": "reasoning_gym:chain_sum", "label_key": "answr"}, "Did you mean 'answer'"),
        ({"prompt_data": "reasoning_gym:chain_sum?min_terms=9&max_terms=2"}, "refuses these settings"),
        ({"prompt_data": "reasoning_gym:chain_sum?max_digits=2"}, "over this limit"),
    ],
)
def test_faults_are_named_with_value_and_fix(options: SimpleNamespace, changes: dict, says: str) -> None:
    vars(options).update(changes)
    (violation,) = check(options)
    assert re.search(says, str(violation)), str(violation)


def test_both_wrong_keys_are_reported_together(options: SimpleNamespace) -> None:
    options.input_key, options.label_key = "a", "b"
    assert [v.option for v in check(options)] == ["--input-key", "--label-key"]


def test_line_that_is_not_json_is_named(options: SimpleNamespace) -> None:
    Path(options.prompt_data).write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt" "c"}\n')
    (violation,) = check(options)
    assert "line 3 is not JSON" in violation.problem and violation.fix


def test_some_missing_labels_matter_only_where_they_are_compared(options: SimpleNamespace) -> None:
    Path(options.prompt_data).write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b"}\n')
    (violation,) = check(options)
    assert "1 rows have no label, the first at" in violation.problem and "line 2" in violation.problem
    options.custom_rm_path = "package.rewards:score"
    assert check(options) == []


def test_template_is_demanded_only_when_asked_for(options: SimpleNamespace, tmp_path: Path) -> None:
    from .conftest import write_tokenizer

    options.hf_checkpoint = str(write_tokenizer(tmp_path / "plain", template=None))
    assert check(options) == []
    options.apply_chat_template = True
    (violation,) = check(options)
    assert violation.option == "--apply-chat-template"


def test_a_long_prompt_far_behind_short_ones_is_found_before_the_run(options: SimpleNamespace) -> None:
    # Lines with more bytes than it, in another field, do not hide it.
    rows = [{"prompt": "a", "answer": "b" * 100}] * 5000
    rows[4321] = {"prompt": [{"role": "user", "content": "a" * 30}], "answer": "b"}
    rows[4999] = {"prompt": "a" * 40, "answer": "b"}
    options.apply_chat_template = True
    for row, tokens in ((4321, 30), (4999, 40)):
        Path(options.prompt_data).write_text("".join(json.dumps(row) + "\n" for row in rows))
        (violation,) = check(options)
        assert violation.option == "--rollout-max-prompt-len" and f"line {row + 1} has" in violation.problem
        assert int(re.search(r"has (\d+) tokens", violation.problem)[1]) >= tokens  # type: ignore[index]
        rows[row] = rows[0]
    Path(options.prompt_data).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert check(options) == []


def test_long_prompts_behind_short_ones_are_no_reason_to_refuse_a_filter(options: SimpleNamespace) -> None:
    lines = [{"prompt": "a" * 30, "answer": 1}] * 100 + [{"prompt": "a", "answer": 1}]
    Path(options.prompt_data).write_text("".join(json.dumps(row) + "\n" for row in lines))
    options.overlong_prompts = "filter"
    assert check(options) == []


def test_tokenizer_that_only_sentencepiece_reads_is_refused_and_a_missing_one_left_to_its_own_check(
    options: SimpleNamespace, tmp_path: Path
) -> None:
    options.hf_checkpoint = str(tmp_path / "none")
    assert check(options) == []
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "tokenizer.model").touch()
    (violation,) = check(options)
    assert violation.option == "--hf-checkpoint" and "save_pretrained" in violation.fix
