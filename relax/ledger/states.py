"""The life of a group, and the answers of the book that keeps it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum


class LedgerError(RuntimeError):
    """The ledger cannot be written, or its owner asked for a step that a group's life does not have."""


class State(IntEnum):
    """Where a group is, in the order of its life.

        PENDING -> ISSUED -> SAMPLED -> SCORED -> READY -> COMMITTED -> TRAINED
           ^          |         |         |         |  <-(taken back)-|
           +--(lost)--+---------+---------+---------+
        any of these but TRAINED -> DROPPED (reason); a draw that was rejected begins again as PENDING, attempt + 1

    Stages report over different sockets, so a later state may be heard of before an earlier one and is then entered at
    once.
    """

    PENDING = 0  # drawn from the data, lost or parked: to be issued
    ISSUED = 1  # a replica holds the lease
    SAMPLED = 2  # all samples have ended
    SCORED = 3
    READY = 4  # passed the filters; tensors are with advantages
    COMMITTED = 5
    TRAINED = 6
    DROPPED = 7

    @property
    def word(self) -> str:
        return self.name.lower()


class StaleReason(StrEnum):
    LINEAGE = "lineage"  # of the run before a resume
    ENDED = "ended"  # the group is trained, dropped or was never drawn
    ATTEMPT = "attempt"  # of a draw that was rejected
    FENCE = "fence"  # of a lease that was given to somebody else since
    LOST = "lost"  # of a lease that was ended; the group waits to be issued again
    LATE = "late"  # an earlier stage, heard of after a later one: its time is noted, nothing else happens
    REPEATED = "repeated"  # heard before


@dataclass(frozen=True, slots=True)
class Accepted:
    """The report moved the group from `previous` to `state`, or (for `GroupBook.check`) would be heard."""

    previous: State
    state: State


@dataclass(frozen=True, slots=True)
class Stale:
    """The report is dropped: the truth has moved on. `detail` says what was reported and what is."""

    reason: StaleReason
    detail: str


@dataclass(frozen=True, slots=True)
class Conservation:
    """issued = trained + dropped(reason) + in flight, over draws (group, attempt) of one lineage.

    `issued` counts first issues; a draw that was lost and waits to be issued again is in flight as PENDING.
    """

    issued: int
    trained: int
    dropped: Mapping[str, int]
    in_flight: Mapping[State, int]

    @property
    def holds(self) -> bool:
        return self.issued == self.trained + sum(self.dropped.values()) + sum(self.in_flight.values())

    def __str__(self) -> str:
        dropped = ", ".join(f"{reason} {n}" for reason, n in sorted(self.dropped.items())) or "none"
        flying = ", ".join(f"{state.word} {n}" for state, n in sorted(self.in_flight.items()) if n) or "none"
        sign = "=" if self.holds else "!="
        return f"issued {self.issued} {sign} trained {self.trained} + dropped ({dropped}) + in flight ({flying})"


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """drawn = trained + dropped for good(reason) + open, over the groups of a lineage and all that it inherits.

    `drawn` counts ids that were ever given out, the others what became of them: a group that a resume forgot is drawn
    and nothing else.
    """

    drawn: int
    trained: int
    dropped: Mapping[str, int]
    open: int

    @property
    def holds(self) -> bool:
        return self.drawn == self.trained + sum(self.dropped.values()) + self.open
