"""What is scored and what comes back. A failure is never a number, and abstaining is neither."""

from dataclasses import dataclass
from typing import Any, Literal

FailureKind = Literal["timeout", "exception", "bad_value", "died"]


@dataclass(frozen=True, slots=True)
class Item:
    """One sample to score. `sample` names it in messages; `label` is the field of `row` that --label-key names."""

    sample: str
    prompt: str
    response: str
    label: Any
    row: dict[str, Any]

    def fields(self) -> dict[str, Any]:
        """As they are: `dataclasses.asdict` would copy the whole row."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sample has no reward.

    timeout: over the time limit, its worker was killed. exception: raised by the function. bad_value: neither None nor
    a finite number. died: the worker ended while scoring it, twice (a crash of its own would repeat, a kill from
    outside would not).
    """

    kind: FailureKind
    function: str
    sample: str
    detail: str

    def __str__(self) -> str:
        return f"reward function {self.function} failed on {self.sample} ({self.kind}): {self.detail}"


@dataclass(frozen=True, slots=True)
class Score:
    """`value` is the reward; None with no `failure` means that the function abstained."""

    value: float | None
    failure: Failure | None = None

    @property
    def abstained(self) -> bool:
        return self.value is None and self.failure is None
