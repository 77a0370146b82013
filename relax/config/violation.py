"""What every check of a run's configuration returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax.config.fields import flag


@dataclass(frozen=True, slots=True)
class Violation:
    """One reason why a run is refused, told so that a newcomer can act on it.

    `option` is the flag as typed (`--global-batch-size`) or the topology key, `value` what was seen, `problem` what is
    wrong with it and `fix` what to change. `source` says where the value came from; checks that see only the options
    leave it empty and the loader fills it in.
    """

    option: str
    value: object
    problem: str
    fix: str
    source: str = ""

    def __str__(self) -> str:
        where = f" (from {self.source})" if self.source else ""
        value = str(self.value) if isinstance(self.value, Path) else self.value
        return f"{self.option} = {value!r}{where}: {self.problem}. {self.fix}"


def refuse(options: Any, name: str, problem: str, fix: str) -> Violation:
    """The value that `options` hold for the option `name` is refused."""
    return Violation(flag(name), getattr(options, name), problem, fix)


class ConfigError(Exception):
    """A run is refused; `violations` holds every reason, not only the first."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("\n".join(str(violation) for violation in self.violations))
