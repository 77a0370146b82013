import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax.rewards import VerifierSpec, check


@pytest.fixture
def options(tmp_path: Path) -> SimpleNamespace:
    path = tmp_path / "p.jsonl"
    entry = {"prompt": "spice>", "answer": "ecips", "metadata": {"source_dataset": "spell_backward"}}
    path.write_text(json.dumps(entry) + "\n")
    return SimpleNamespace(
        prompt_data=str(path), label_key=None, rm_type="reasoning_gym", rm_exact=True, custom_rm_path=None, seed=1
    )


def test_usable_rewards_have_no_violation(options: SimpleNamespace) -> None:
    assert check(options) == []
    options.rm_type, options.rm_exact, options.custom_rm_path = None, False, "tests.rewards.functions:told"
    assert check(options) == []
    options.rm_type, options.custom_rm_path, options.label_key = "math", None, "answer"
    assert check(options) == []


def custom(path: str) -> dict:
    return {"rm_type": None, "rm_exact": False, "custom_rm_path": path}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rm_type": None, "rm_exact": False}, "--rm-type = None: no reward is selected"),
        ({"custom_rm_path": "a:b"}, "--custom-rm-path = 'a:b': --rm-type reasoning_gym is set too"),
        ({"rm_type": "math", "label_key": "answer"}, "--rm-exact = True: it has no effect on --rm-type math"),
        ({"rm_type": "math", "rm_exact": False}, "--label-key = None: --rm-type math compares with a label"),
        (custom("functions"), "'functions' is not of the form module:function"),
        (custom("tests.rewards.nowhere:f"), "there is no module 'tests.rewards.nowhere'"),
        (custom("tests.rewards.functions:missing"), "has no function 'missing'"),
        (custom("tests.rewards.functions:NOT_A_FUNCTION"), "is a int, not a function"),
        (custom("tests.rewards.functions:asynchronous"), "is async"),
        (
            custom("tests.rewards.functions:two_arguments"),
            "cannot be called as two_arguments.prompt, response, label, row",
        ),
    ],
)
def test_unusable_rewards_are_refused(options: SimpleNamespace, changes: dict, says: str) -> None:
    vars(options).update(changes)
    (violation,) = check(options)
    assert re.search(says, str(violation)), str(violation)


def test_of_two_rewards_the_places_of_both_are_named(options: SimpleNamespace) -> None:
    options.custom_rm_path = "a:b"
    (violation,) = check(options, {"rm_type": "t.yaml:12", "custom_rm_path": "flag"})
    assert "--rm-type reasoning_gym (from t.yaml:12) is set too" in violation.problem
    assert violation.fix == "Drop --rm-type (from t.yaml:12) or --custom-rm-path (from flag)."


def test_rows_that_reasoning_gym_cannot_score_are_refused(options: SimpleNamespace) -> None:
    Path(options.prompt_data).write_text('{"prompt": "a"}\n')
    assert "line 1: the row is no reasoning-gym entry" in check(options)[0].problem
    row = {"answer": "", "metadata": {"source_dataset": "nonsense"}}
    Path(options.prompt_data).write_text(json.dumps(row) + "\n")
    assert "no task 'nonsense'" in check(options)[0].problem


def test_spec_carries_the_settings_of_generated_prompts_over_json() -> None:
    options = SimpleNamespace(
        prompt_data="reasoning_gym:chain_sum?max_terms=3&size=9",
        rm_type="reasoning_gym",
        rm_exact=True,
        custom_rm_path=None,
    )
    spec = VerifierSpec.from_options(options)
    assert spec.configs == {"chain_sum": {"max_terms": 3, "size": 9}}
    assert VerifierSpec.from_json(spec.to_json()) == spec
