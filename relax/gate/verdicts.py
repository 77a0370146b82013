"""What the gate answers: a batch, or what stands in its way."""

from dataclasses import dataclass
from enum import Enum


class GateError(RuntimeError):
    """An act that the gate refuses, or a report that contradicts what it was told before. State is unchanged."""


class Refusal(Enum):
    """Why a group may not be issued now."""

    END = "end"  # every group that the remaining batches need is already open
    SLOTS = "slots"  # all (L + 1) P slots are held
    VERSION = "version"  # the replica is so old that its tokens would be too stale for the next batch
    STALENESS = "staleness"  # the batches that could train it in time are full


class Wait(Enum):
    """Why no batch can be committed now."""

    END = "end"  # the last batch is committed
    UNSTARTED = "unstarted"  # a committed batch has not started; at most one is committed ahead
    DUE = "due"  # groups that must be trained by now are still on their way
    READY = "ready"  # too few groups are ready


@dataclass(frozen=True, slots=True)
class Batch:
    """A commit: the members of batch `index` in group-id order, and for each the oldest version among its tokens;
    and the open groups that it dropped, where there were spares."""

    index: int
    groups: tuple[int, ...]
    oldest: tuple[int, ...]
    surplus: tuple[int, ...] = ()

    @property
    def staleness(self) -> tuple[int, ...]:
        return tuple(self.index - version for version in self.oldest)


@dataclass(frozen=True, slots=True)
class Blocked:
    """What the commit of `batch` waits for.

    `missing` is how many more groups must be ready to fill the batch. `groups` names those that the commit cannot go
    without, least (deadline, id) first; at least `needed` of them must become ready or be dropped. It is empty while
    groups that are not even issued yet could fill the batch.
    """

    batch: int
    wait: Wait
    missing: int = 0
    needed: int = 0
    groups: tuple[int, ...] = ()

    def __str__(self) -> str:
        match self.wait:
            case Wait.END:
                return "no batch is left to commit"
            case Wait.UNSTARTED:
                return f"batch {self.batch} waits for batch {self.batch - 1} to start"
        names = ", ".join(map(str, self.groups[:8])) + (f" and {len(self.groups) - 8} more" if self.groups[8:] else "")
        if self.wait is Wait.DUE:
            return f"batch {self.batch} waits for {self.needed} of the groups that are due: {names}"
        return f"batch {self.batch} waits for {self.missing} more ready groups" + (f": {names}" if names else "")
