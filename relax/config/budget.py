"""How often a service may be started again: N times within a window of seconds."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartBudget:
    restarts: int
    seconds: float

    @classmethod
    def parse(cls, text: str) -> "RestartBudget":
        """`3/600`. Raises ValueError."""
        if not (found := re.fullmatch(r"(\d+)/(\d+(?:\.\d+)?)", text.strip())) or float(found[2]) <= 0:
            raise ValueError(f"{text!r} is not N/SECONDS, with N of at least 0 and SECONDS above 0")
        return cls(int(found[1]), float(found[2]))
