"""pydantic's errors in the words of a person who types options."""

import difflib
from collections.abc import Iterable
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

NAME_FIX = "A name has letters, digits, dots, dashes and underscores, and starts with a letter or a digit."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, if any is like it."""
    found = difflib.get_close_matches(name.replace("_", "-").lower(), list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def hint(name: str, known: Iterable[str], listing: str) -> str:
    """`Did you mean x?`, or `listing` when nothing is near."""
    match = nearest(name, known)
    return f"Did you mean {match}?" if match else listing


def explain(error: ErrorDetails, field: FieldInfo | None) -> tuple[str, str]:
    """(problem, fix) of one failed value."""
    kind = error["type"]
    limits = error.get("ctx", {})
    bounds = {
        "greater_than_equal": ("is too small", "at least {ge}"),
        "greater_than": ("is too small", "above {gt}"),
        "less_than_equal": ("is too large", "at most {le}"),
        "less_than": ("is too large", "below {lt}"),
    }
    if kind in bounds:
        problem, fix = bounds[kind]
        return problem, f"Give a value {fix.format(**limits)}."
    if kind == "literal_error":
        return "is none of the choices", f"Choose one of {', '.join(choices(field)) or limits.get('expected', '')}."
    if kind == "string_pattern_mismatch":  # the one pattern that a user meets is that of names
        return "is no name", NAME_FIX
    if kind == "string_too_long":
        return "is too long", f"Give at most {limits['max_length']} characters."
    words = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "string": "text",
        "path": "a path",
        "finite": "a finite number",
        "list": "a list",
    }
    wanted = words.get(kind.split("_")[0], "")
    if wanted:
        return f"is not {wanted}", f"Give {wanted}."
    return error["msg"].lower(), "See --help."


def choices(field: FieldInfo | None) -> list[str]:
    """The literal values of a field, those of a union included."""
    return [] if field is None else list(_literals(field.annotation))


def _literals(annotation: Any) -> Iterable[str]:
    for part in get_args(annotation):
        if isinstance(part, str):
            yield part
        else:
            yield from _literals(part)
