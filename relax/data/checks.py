"""What can be wrong with the prompt data, found before a process starts. Fast: parses rows, tokenizes only a few."""

import difflib
import heapq
import json
import os
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from relax.config.violation import Violation
from relax.data.errors import DataError
from relax.data.generated import check_keys, parse_spec
from relax.data.sources import REASONING_GYM, JsonlSource, PromptSource, Row, open_source
from relax.data.tokenize import PromptTokenizer, tokenize

# Rows beyond these are checked when they are read; a bad one then ends the run, named.
_PARSED_BYTES = 64 * 2**20
_PARSED_ROWS = 100_000
_TOKENIZED_ROWS = 64
_LONGEST_ROWS = 64
_SEARCHED_FOR_A_FIT = 2048


def check(options: Any) -> list[Violation]:
    """Every reason why the prompts of `options` (relax.config.Options) cannot be used; empty when they can.

    A fault that hides the rest (no such file) is reported alone; a checkpoint without a tokenizer is left to the check
    of the checkpoint. Never raises for a fault of the data.
    """
    spec = str(options.prompt_data)
    try:
        if spec.startswith(REASONING_GYM):
            return _check_generated(spec, options)
        source = open_source(spec, seed=options.seed)
        rows = _parse(source)
    except DataError as error:
        return [Violation("--prompt-data", spec, error.problem, error.fix)]
    return _check_keys(rows, source.where, options) or _check_tokens(source, options, rows)


def _check_generated(spec: str, options: Any) -> list[Violation]:
    """Importing reasoning-gym takes longer than a validation may, so it happens only for settings it must judge."""
    parsed = parse_spec(spec)
    check_keys(spec, parsed)
    if parsed.config.keys() <= {"size", "seed"}:
        fields: Row = dict.fromkeys(("prompt", "question", "answer", "metadata"), "")
        return _check_keys([fields], lambda _: spec, options)
    source = open_source(spec, seed=options.seed)
    return _check_keys([source.row(0)], source.where, options) or _check_tokens(source, options)


def _parse(source: PromptSource) -> list[Row]:
    rows = []
    for i in range(min(len(source), _PARSED_ROWS)):
        if isinstance(source, JsonlSource) and source.bytes_up_to(i) > _PARSED_BYTES:
            break
        rows.append(source.row(i))
    return rows


def _check_keys(rows: list[Row], where: Callable[[int], str], options: Any) -> list[Violation]:
    violations = []
    key = options.input_key
    missing = [i for i, row in enumerate(rows) if key not in row]
    if len(missing) == len(rows):
        violations.append(
            Violation("--input-key", key, f"no row of {options.prompt_data} has this field", _fields(rows, key))
        )
    elif missing:
        problem = f"{len(missing)} rows lack this field, the first at {where(missing[0])}"
        violations.append(Violation("--input-key", key, problem, "Complete these rows or leave them out."))

    key = options.label_key
    missing = [] if key is None else [i for i, row in enumerate(rows) if row.get(key) is None]
    # A custom function may know what to do without a label; the built-in comparisons cannot.
    compares = options.custom_rm_path is None and options.rm_type in ("math", "exact_match")
    if key is not None and len(missing) == len(rows):
        violations.append(
            Violation("--label-key", key, f"no row of {options.prompt_data} has this field", _fields(rows, key))
        )
    elif missing and compares:
        problem = f"{len(missing)} rows have no label, the first at {where(missing[0])}"
        violations.append(
            Violation("--label-key", key, problem, f"--rm-type {options.rm_type} needs one in every row.")
        )
    return violations


def _fields(rows: list[Row], key: str) -> str:
    names = sorted({name for row in islice(rows, 1000) for name in row})
    close = difflib.get_close_matches(key, names, n=1)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    return f"{guess}The rows have: {', '.join(names)}."


def _longest(rows: Sequence[Row], key: str) -> list[int]:
    """The rows with the longest prompts in bytes, the longest first."""

    def size(index: int) -> int:
        content = rows[index].get(key)
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
        return len(text.encode("utf-8", "surrogatepass"))

    return heapq.nlargest(_LONGEST_ROWS, range(len(rows)), key=size)


def _check_tokens(source: PromptSource, options: Any, rows: Sequence[Row] = ()) -> list[Violation]:
    """Tokenizes the first rows, and more of them only to find one that fits; of `rows`, all that were parsed, also the
    longest where one that is too long ends the run."""
    checkpoint = Path(options.hf_checkpoint)
    # Says no, and does not raise, where the name is one that no file can have.
    if not any(os.access(checkpoint / f"tokenizer.{kind}", os.R_OK) for kind in ("json", "model")):
        return []
    try:
        tokenizer = PromptTokenizer(checkpoint)
    except DataError as error:
        return [Violation("--hf-checkpoint", options.hf_checkpoint, error.problem, error.fix)]
    if options.apply_chat_template and tokenizer.chat_template is None:
        problem = f"the tokenizer of {options.hf_checkpoint} has no chat template"
        fix = "Drop it, or add a chat_template.jinja to the checkpoint."
        return [Violation("--apply-chat-template", True, problem, fix)]
    limit, fits, tried = options.rollout_max_prompt_len, 0, min(len(source), _SEARCHED_FOR_A_FIT)
    refuses = options.overlong_prompts == "refuse"
    first = range(min(tried, _TOKENIZED_ROWS))
    for i in [*first, *_longest(rows, options.input_key)] if refuses else range(tried):
        if i >= _TOKENIZED_ROWS and fits and not refuses:
            return []
        try:
            tokenized = tokenize(
                tokenizer, source.row(i), input_key=options.input_key, apply_chat_template=options.apply_chat_template
            )
        except DataError as error:
            return [Violation("--prompt-data", options.prompt_data, error.at(source.where(i)).problem, error.fix)]
        length = len(tokenized.token_ids)
        if length <= limit:
            fits += 1
        elif refuses:
            problem = f"{source.where(i)} has {length} tokens, over this limit"
            fix = "Raise it, or leave long prompts out with --overlong-prompts filter."
            return [Violation("--rollout-max-prompt-len", limit, problem, fix)]
    if fits:
        return []
    which = f"all {tried} prompts are" if tried == len(source) else f"each of the first {tried} prompts is"
    return [Violation("--rollout-max-prompt-len", limit, f"{which} longer, so none would be left", "Raise it.")]
