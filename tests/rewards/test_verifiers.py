import json

import pytest

from relax.rewards import VerifierSpec
from relax.rewards.verifiers import build

MATH = build(VerifierSpec("math"))
EXACT = build(VerifierSpec("exact_match"))
ENTRY = {"question": "?", "answer": "ecips", "metadata": {"source_dataset": "spell_backward", "word": "spice"}}


@pytest.mark.parametrize(
    ("label", "response", "reward"),
    [
        (42, "So the answer is \\boxed{42}.", 1.0),
        ("42", "The answer is 42", 1.0),
        ("42", "The answer is 43", 0.0),
        ("42", "I do not know.", 0.0),
        ("42", "", 0.0),
        ("\\frac{1}{2}", "$0.5$", 1.0),
        ("$\\frac{1}{2}$", "\\boxed{\\frac{2}{4}}", 1.0),
        ("3\\sqrt{2}", "\\boxed{\\sqrt{18}}", 1.0),
        ("3\\sqrt{2}", "\\boxed{3}", 0.0),
        ("-3.5e2", "\\boxed{-350}", 1.0),
        ("1,234", "\\boxed{1234}", 1.0),
        ("x^2+1", "$1+x^2$", 1.0),
        ("48/2 = 24\n#### 72", "It is 72.", 1.0),
        ("48/2 = 24\n#### 72", "It is 24.", 0.0),
        ("\\{1,2\\}", "\\boxed{\\{2,1\\}}", 1.0),
    ],
)
def test_math_compares_values_not_spelling(label: object, response: str, reward: float) -> None:
    assert MATH("", response, label, {}) == reward


@pytest.mark.parametrize("label", [None, True, ["42"], ""])
def test_label_that_cannot_be_compared_is_an_error_and_no_zero(label: object) -> None:
    with pytest.raises(ValueError, match="the label"):
        MATH("", "42", label, {})
    if label != "":
        with pytest.raises(ValueError, match="the label"):
            EXACT("", "42", label, {})


def test_exact_match_ignores_surrounding_white_space_alone() -> None:
    assert EXACT("", " Paris\n", "Paris", {}) == 1.0
    assert EXACT("", "paris", "Paris", {}) == 0.0
    assert EXACT("", "7", 7, {}) == 1.0


def test_reasoning_gym_pays_the_own_score_of_the_task() -> None:
    own = build(VerifierSpec("reasoning_gym"))
    assert own("", "ecips", None, ENTRY) == 1.0
    assert 0 < (own("", "ecipz", None, ENTRY) or 0) < 1


def test_exact_pays_one_only_where_the_score_is_exactly_one() -> None:
    exact, own = build(VerifierSpec("reasoning_gym", exact=True)), build(VerifierSpec("reasoning_gym"))
    assert exact("", "ecips", None, ENTRY) == 1.0
    assert exact("", "ecipz", None, ENTRY) == 0.0
    # The task's own scorer adds up ninths to more than one for an answer with a tail.
    long = {"answer": "abcdefghi", "metadata": {"source_dataset": "spell_backward"}}
    assert (own("", "abcdefghi and more", None, long) or 0) > 1.0
    assert exact("", "abcdefghi and more", None, long) == 0.0


def test_row_that_is_no_entry_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no reasoning-gym entry .* fields \['prompt'\]"):
        build(VerifierSpec("reasoning_gym"))("", "x", None, {"prompt": "y"})


def test_scorer_uses_the_settings_the_prompts_were_made_with() -> None:
    entry = {"answer": "", "metadata": {"source_dataset": "puzzle24"}}
    small = build(VerifierSpec("reasoning_gym", configs={"puzzle24": {"max_value": 5}}))
    assert build(VerifierSpec("reasoning_gym"))("", "6*4*1*1", None, entry) == 1.0
    assert small("", "6*4*1*1", None, entry) == 0.01


def test_entries_of_every_task_score_the_same_after_the_wire() -> None:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    verifier = build(VerifierSpec("reasoning_gym"))
    for task in set(DATASETS) - {"composite"}:
        dataset = reasoning_gym.create_dataset(task, seed=7, size=1)
        entry = dataset[0]
        received = json.loads(json.dumps(entry))
        assert verifier("", entry["answer"], None, received) == dataset.score_answer(entry["answer"], entry), task


def test_function_of_the_smollm2_example_reads_the_first_line_alone() -> None:
    first_line = build(VerifierSpec("custom", path="examples.smollm2.reward:first_line"))
    assert first_line("", " 7\n3 +", "7", {}) == 1.0
    assert first_line("", " 7 or 8\n", "7", {}) == 0.0
    assert first_line("", "\n7", "7", {}) == 0.0
