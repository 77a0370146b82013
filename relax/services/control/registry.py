"""Who is in the run: members, when they were last heard, and what they count.

No clock and no message inside: the controller says what time it is and tells the others what changed.
"""

import json
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from relax.protocol.messages import Heartbeat, Member, Register

# So many ended incarnations are remembered: a late word of one must not make it a member again.
ENDED = 4096
# No run can move without one of each.
ALWAYS_NEEDED = ("rollout", "reward", "advantages", "actor")


class RegistrationError(Exception):
    """A service that cannot join this run; the text says why and what to change."""


@dataclass(slots=True)
class Entry:
    member: Member
    node: str
    pid: int
    heard: float  # monotonic seconds
    activity: str = "registering"
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)

    @property
    def work(self) -> tuple[str, dict[str, float]]:
        """What is another from beat to beat of a member that gets on. How long it waits for others is no part of it."""
        return self.activity, {name: n for name, n in self.counters.items() if not name.startswith("wait/")}


class Registry:
    """`options` are those that all members share, as JSON values; `needed` the roles without which this run cannot
    move."""

    def __init__(self, options: dict[str, str], needed: Sequence[str] = ALWAYS_NEEDED) -> None:
        self._options, self._needed = options, needed
        self.entries: dict[str, Entry] = {}
        self._ended: deque[str] = deque(maxlen=ENDED)  # incarnations that are no members any more
        self._vacant: dict[str, float] = {}  # role -> since when nobody has it, after somebody had
        self._names: dict[str, str] = {}  # that somebody has or died with -> their roles
        self._incarnations: set[str] = set()  # of all members
        self.restarts: Counter[str] = Counter()  # by name

    def check(self, message: Register) -> None:
        """Raises RegistrationError where the service cannot be a member: its options are not the run's, its name is
        another role's or somebody's on another node, others could not reach it, or this life of it has ended."""
        name = message.member.name
        differing = sorted(
            key
            for key in self._options.keys() | message.options.keys()
            if self._options.get(key) != message.options.get(key)
        )
        if differing:
            told = "; ".join(
                f"{key}: {_value(message.options.get(key))} there, {_value(self._options.get(key))} in the run"
                for key in differing
            )
            raise RegistrationError(
                f"{name} was started with other options than the controller ({told}). "
                "Start every service of a run with the same options."
            )
        held = self.entries.get(name)
        if held is not None and held.member.role != message.member.role:
            raise RegistrationError(
                f"{name} is a {held.member.role} in this run already, it cannot be a {message.member.role} too"
            )
        if held is not None and held.node != message.node:
            raise RegistrationError(
                f"{name} is on node {held.node or '-'} in this run, and this one is on node {message.node or '-'}. "
                "A service keeps its name: put the entries that are added to a topology behind those that are there. "
                "Where it is to move, it may come once the old one has ended or been silent for --peer-timeout"
            )
        for other in self.entries.values():
            if _transport(other.member.endpoint) != _transport(message.member.endpoint):
                raise RegistrationError(
                    f"{name} listens at {message.member.endpoint} and {other.member.name} at {other.member.endpoint}, "
                    "and not every host can reach both: start all services of the run with a node that has an address, "
                    "or none"
                )
        if message.member.incarnation in self._ended:
            raise RegistrationError(f"{name} ({message.member.incarnation}) was a member and is none any more")

    def register(self, message: Register, now: float) -> Entry:
        """Add or replace a member. Raises what `check` does."""
        self.check(message)
        name = message.member.name
        if name not in self.entries and name in self._names:
            self.restarts[name] += 1
        self._names[name] = message.member.role
        entry = Entry(message.member, message.node, message.pid, now)
        self.entries[name] = entry
        self._incarnations.add(message.member.incarnation)
        self._vacant.pop(message.member.role, None)
        return entry

    def remove(self, member: Member, now: float, *, died: bool) -> None:
        """This life of a service is no member any more, and will not be again."""
        held = self.entries.get(member.name)
        if held is not None and held.member == member:
            del self.entries[member.name]
            self._ended.append(member.incarnation)
            self._incarnations.discard(member.incarnation)
            if not died:
                self._names.pop(member.name, None)
            if not self.of_role(member.role):
                self._vacant[member.role] = now

    def expects(self, role: str) -> bool:
        """Whether somebody has this role, or died with it and may come again."""
        return role in self._names.values()

    def lives(self, incarnation: str) -> bool:
        return incarnation in self._incarnations

    def name_of(self, incarnation: str) -> str:
        """The name of a member's life, else that it has ended."""
        alive = (e.member.name for e in self.entries.values() if e.member.incarnation == incarnation)
        return next(alive, f"{incarnation}, which has ended")

    def is_member(self, name: str, incarnation: str) -> bool:
        entry = self.entries.get(name)
        return entry is not None and entry.member.incarnation == incarnation

    def bear_with(self, seconds: float) -> None:
        """Nobody could be heard for so long."""
        for entry in self.entries.values():
            entry.heard += seconds

    def other_life(self, member: Member) -> Entry | None:
        """The entry under this name of another process, alive or dead."""
        held = self.entries.get(member.name)
        return held if held is not None and held.member.incarnation != member.incarnation else None

    def beat(self, beat: Heartbeat, now: float) -> bool:
        """Note a heartbeat. False when that incarnation is not a member (any more)."""
        entry = self.entries.get(beat.name)
        if entry is None or entry.member.incarnation != beat.incarnation:
            return False
        entry.heard, entry.activity, entry.counters, entry.gauges = now, beat.activity, beat.counters, beat.gauges
        return True

    def role(self, name: str) -> str | None:
        """The role of a member; None when nobody of that name is one."""
        entry = self.entries.get(name)
        return None if entry is None else entry.member.role

    def members(self) -> tuple[Member, ...]:
        return tuple(entry.member for entry in self.entries.values())

    def of_role(self, role: str) -> list[Entry]:
        return sorted((e for e in self.entries.values() if e.member.role == role), key=lambda e: e.member.name)

    def vacant(self) -> list[str]:
        """Roles without which the run cannot move and that nobody has now."""
        return [role for role in self._needed if not self.of_role(role)]

    def missing(self, now: float, began: float, patience: float) -> list[str]:
        """Roles without which the run cannot move and that nobody has had for more than `patience` seconds, `began` the
        moment from which they could be taken."""
        return [role for role in self.vacant() if now - self._vacant.get(role, began) > patience]

    def silent(self, now: float, timeout: float) -> Entry | None:
        """The member that has been silent longest, if it is past `timeout` seconds."""
        quiet = [e for e in self.entries.values() if now - e.heard > timeout]
        return min(quiet, key=lambda e: e.heard, default=None)


def _transport(endpoint: str) -> str:
    return endpoint.partition("://")[0]


def _value(text: str | None) -> str:
    return "not set" if text is None else str(json.loads(text))
