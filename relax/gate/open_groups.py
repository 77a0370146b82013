"""The open groups of the gate, and how many of them are due when: what the inequality counts, no rule of its own."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from relax.gate.verdicts import GateError


class Place(Enum):
    HELD = 1  # at a replica or a later stage, on its way
    LOST = 2  # without a replica: to be issued again, or parked with its tokens
    READY = 3


@dataclass(slots=True)
class Group:
    place: Place
    deadline: int | None
    has_tokens: bool = False
    rank: int = 0  # among the ready, where the first are taken


class OpenGroups:
    """Groups that are issued, not committed and not dropped, by id.

    `due[w]` of them have the deadline w, and `due_ready[w]` of these are ready; `ready` are in all. Every change of a
    deadline or of readiness goes through here, so that no count is ever made anew.
    """

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self.due: dict[int, int] = {}
        self.due_ready: dict[int, int] = {}
        self.ready = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    def items(self) -> Iterable[tuple[int, Group]]:
        return self._groups.items()

    def get(self, group: int) -> Group | None:
        return self._groups.get(group)

    def find(self, group: int) -> Group:
        record = self._groups.get(group)
        if record is None:
            raise GateError(f"group {group} is not open: never issued, committed or dropped")
        return record

    def on_their_way(self, deadline: int | None = None) -> tuple[int, ...]:
        """Those that are not ready and, where `deadline` is given, due by then; least (deadline, id) first."""
        rows = (
            (record.deadline is None, record.deadline or 0, group)
            for group, record in self._groups.items()
            if record.place is not Place.READY
            and (deadline is None or (record.deadline is not None and record.deadline <= deadline))
        )
        return tuple(group for _, _, group in sorted(rows))

    # --- changes -------------------------------------------------------------------------------------------------

    def add(self, group: int) -> Group:
        """One more; its deadline is still to be set."""
        record = self._groups[group] = Group(Place.HELD, None)
        return record

    def move(self, record: Group, deadline: int | None) -> None:
        """The group, which is not ready, has this deadline now."""
        if record.deadline == deadline:
            return
        _count(self.due, record.deadline, -1)
        _count(self.due, deadline, 1)
        record.deadline = deadline

    def make_ready(self, record: Group) -> None:
        record.place = Place.READY
        _count(self.due_ready, record.deadline, 1)
        self.ready += 1

    def unready(self, record: Group) -> None:
        """The group is not ready, or not any more."""
        if record.place is Place.READY:
            _count(self.due_ready, record.deadline, -1)
            self.ready -= 1
            record.place = Place.HELD

    def remove(self, group: int) -> None:
        record = self._groups[group]
        self.unready(record)
        self.move(record, None)
        del self._groups[group]

    def take(self, groups: Iterable[int]) -> dict[int, Group]:
        """These ready groups are open no more; they keep what they are, to be `put_back`."""
        taken = {group: self._groups.pop(group) for group in groups}
        self._count_ready(taken, -1)
        return taken

    def put_back(self, taken: dict[int, Group]) -> None:
        self._groups.update(taken)
        self._count_ready(taken, 1)

    def _count_ready(self, groups: dict[int, Group], change: int) -> None:
        for record in groups.values():
            _count(self.due, record.deadline, change)
            _count(self.due_ready, record.deadline, change)
        self.ready += change * len(groups)


def _count(counts: dict[int, int], deadline: int | None, change: int) -> None:
    if deadline is None:
        return
    left = counts.get(deadline, 0) + change
    if left:
        counts[deadline] = left
    else:
        del counts[deadline]
