"""The reward functions. All have the signature of a custom one:

    f(prompt: str, response: str, label, row: dict) -> float | None

`prompt` and `response` are the decoded tokens of each without special tokens, `label` is the row's field named by
--label-key (None without it), `row` the whole row. None abstains. They run in a worker process, one
sample at a time, which is killed at the time limit: none of them needs a timeout of its own.
"""

import functools
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

from relax.functions import load_usable
from relax.rewards.spec import VerifierSpec

Verifier = Callable[[str, str, Any, dict[str, Any]], float | None]

# Their scorers compare the metadata with tuples, which JSON turns into lists.
_TASKS_WITH_TUPLES = ("arc_agi", "rearc")


def build(spec: VerifierSpec) -> Verifier:
    """The function that `spec` names. Raises FunctionError for an unusable custom one."""
    if spec.kind == "custom":
        return load_usable(spec.path, "prompt", "response", "label", "row")
    if spec.kind == "reasoning_gym":
        return ReasoningGym(exact=spec.exact, configs=spec.configs)
    if spec.kind == "math":
        return math_equal()
    if spec.kind == "exact_match":
        return exact_match
    raise ValueError(f"unknown reward {spec.kind!r}: choose reasoning_gym, math, exact_match or custom")


def exact_match(prompt: str, response: str, label: Any, row: dict[str, Any]) -> float:
    """1 where the response equals the label (a text or a number), surrounding white space aside."""
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise ValueError(f"the label is {label!r}; exact_match compares with a text or a number")
    return float(response.strip() == str(label).strip())


def math_equal() -> Verifier:
    """1 where math-verify finds the response's final expression equal to the label's, else 0.

    The label may be a number, LaTeX with or without delimiters, or a solution with `\\boxed{}` or `####`.
    """
    import math_verify.grader
    import math_verify.parser

    # Its time limit is an alarm signal, which the one of the worker replaces; it would warn about that at every start.
    math_verify.grader.TIMEOUT_WARNING_SHOWN = math_verify.parser.TIMEOUT_WARNING_SHOWN = True
    parse = functools.partial(math_verify.parser.parse, parsing_timeout=None, raise_on_error=True)

    def math(prompt: str, response: str, label: Any, row: dict[str, Any]) -> float:
        gold = parse(_delimited(label))
        if not gold:
            raise ValueError(f"math-verify finds no expression in the label {label!r}")
        answer = parse(response)
        return float(math_verify.grader.verify(gold, answer, timeout_seconds=None, raise_on_error=True))

    return math


def _delimited(label: Any) -> str:
    """The label as math-verify reads it best: it takes bare LaTeX only between delimiters, and `2e3` for Euler's e."""
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise ValueError(f"the label is {label!r}; math compares with a text or a number")
    text = str(label).rpartition("####")[2].strip()
    try:
        return f"\\boxed{{{Decimal(text):f}}}"
    except InvalidOperation:
        delimited = "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text
        return text if delimited else f"\\boxed{{{text}}}"


class ReasoningGym:
    """The score of the task that a reasoning-gym entry names in `metadata.source_dataset`."""

    def __init__(self, *, exact: bool, configs: dict[str, dict[str, Any]]) -> None:
        # Imported here, so that a worker has paid for it (seconds) before its first sample's time limit runs.
        import reasoning_gym

        self._create = functools.cache(lambda task: reasoning_gym.create_dataset(task, **configs.get(task, {})))
        self._exact = exact

    def __call__(self, prompt: str, response: str, label: Any, row: dict[str, Any]) -> float:
        task = task_of(row)
        entry = {**row, "metadata": _tuples(row["metadata"])} if task in _TASKS_WITH_TUPLES else row
        score = self._create(task).score_answer(response, entry)
        return float(score == 1.0) if self._exact else score


def task_of(row: dict[str, Any]) -> str:
    """The reasoning-gym task of an entry; ValueError for a row that is none."""
    metadata = row.get("metadata")
    task = metadata.get("source_dataset") if isinstance(metadata, dict) else None
    if not isinstance(task, str) or "answer" not in row:
        raise ValueError(f"the row is no reasoning-gym entry (answer, metadata.source_dataset): fields {sorted(row)}")
    return task


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value
