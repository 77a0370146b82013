"""How a log record looks to a person."""

from collections.abc import Mapping
from typing import Any

LEADING = ("time", "level", "service", "event")
LAST = ("error", "traceback")
STYLES = {"debug": "dim", "warning": "yellow", "error": "bold red", "critical": "bold white on red"}


def plain_line(record: Mapping[str, Any], *, width: int = 14) -> str:
    """`12:30:01.123 warning  rollout-0      weights late  version=3` with a traceback on lines of its own."""
    head = f"{clock(record)} {record.get('level', '?')!s:<8} {record.get('service', '?')!s:<{width}} "
    return head + message(record)


def clock(record: Mapping[str, Any]) -> str:
    """Hours to milliseconds, in UTC as the record has it."""
    return str(record.get("time", "?"))[11:23]


def message(record: Mapping[str, Any]) -> str:
    facts = [f"{key}={_short(value)}" for key, value in record.items() if key not in LEADING and key not in LAST]
    text = "  ".join([str(record.get("event", "")), *facts])
    if "error" in record:
        text += f"  error={record['error']}"
    if "traceback" in record:
        text += "\n" + "\n".join("    " + line for line in str(record["traceback"]).splitlines())
    return text


def _short(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return repr(text) if " " in text or not text else text
