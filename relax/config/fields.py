"""How an option is declared: one pydantic field with its help, and what the flags need to know about it.

The section an option belongs to is the class that declares it (see options.py).
"""

from dataclasses import dataclass
from typing import Any, get_args

from pydantic import Field
from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True)
class Extra:
    """What pydantic does not hold: `derived` says from what a missing value is computed, `unavailable` what to do
    instead of an option whose part is not built yet, `required` that the user must give it, `bare` what the flag means
    without a value, where it may stand so."""

    derived: str = ""
    unavailable: str = ""
    required: bool = False
    metavar: str = ""
    bare: str = ""


def opt(
    default: Any,
    help: str,
    *,
    derived: str = "",
    unavailable: str = "",
    required: bool = False,
    metavar: str = "",
    bare: str = "",
    **constraints: Any,
) -> Any:
    """Declares an option. `constraints` are pydantic's (ge, gt, le, lt)."""
    info = Field(default, description=help, **constraints)
    info.metadata.append(Extra(derived, unavailable, required, metavar, bare))
    return info


def extra(field: FieldInfo) -> Extra:
    return next((item for item in field.metadata if isinstance(item, Extra)), Extra())


def flag(name: str) -> str:
    """`rollout_batch_size` -> `--rollout-batch-size`."""
    return "--" + name.replace("_", "-")


def accepts(field: FieldInfo, kind: type) -> bool:
    """Whether the field's annotation is `kind` or a union that holds it."""
    return field.annotation is kind or kind in get_args(field.annotation)


def is_switch(field: FieldInfo) -> bool:
    return field.annotation is bool


def is_optional(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)
