"""The rollout replicas as the controller sees them, and which of them gets the next group."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from relax.gate.placement import Placement
from relax.protocol.messages import Lease, Member


@dataclass(slots=True)
class Replica:
    """`version` is the newest acknowledged, -1 before the first; `announced` when (monotonic seconds) the newest
    version was announced to it. `samples` and `keeps` are the groups that it samples and those whose tensors it holds
    for the stages after it, each with its fence."""

    member: Member
    version: int = -1
    announced: float = 0.0
    leaving: bool = False
    samples: dict[int, int] = field(default_factory=dict)
    keeps: dict[int, int] = field(default_factory=dict)


class Replicas:
    def __init__(self) -> None:
        self._by_name: dict[str, Replica] = {}
        self._placement = Placement()
        self._leaving: list[Replica] = []
        self._left = 0
        self._dead: set[str] = set()  # to be started again
        self._teamed = False  # whether there was a lockstep batch

    def __iter__(self) -> Iterator[Replica]:
        return iter(sorted(self._by_name.values(), key=lambda r: r.member.name))

    def joined(self, member: Member) -> Replica:
        """A new life of a replica: it holds nothing and serves nothing yet."""
        self._dead.discard(member.name)
        self._placement.gone(member.name)
        replica = self._by_name[member.name] = Replica(member)
        return replica

    def died(self, member: Member) -> Replica | None:
        """This life of a replica has ended; returns what it held. None when it had left."""
        name = member.name
        replica = self._by_name.get(name)
        if replica is None or replica.member != member:
            return None
        del self._by_name[name]
        self._dead.add(name)
        self._placement.gone(name)
        if replica.leaving:
            self._leaving.remove(replica)
        return replica

    def get(self, name: str | None) -> Replica | None:
        return self._by_name.get(name or "")

    def serves(self, replica: Replica, version: int, credit: int) -> None:
        """`credit`: how many groups it takes at a time."""
        replica.version = version
        if not replica.leaving:
            self._placement.serves(replica.member.name, version, credit)

    # --- what they hold ----------------------------------------------------------------------------------------------

    def takes(self, replica: Replica, lease: Lease) -> None:
        replica.samples[lease.group] = lease.fence
        self._placement.took(replica.member.name)

    def sampled(self, name: str, lease: Lease) -> None:
        """The replica has finished the group and keeps its tensors."""
        replica = self.get(name)
        if replica is not None and replica.samples.get(lease.group) == lease.fence:
            self._let_go(replica, lease.group)
            replica.keeps[lease.group] = lease.fence

    def ended(self, name: str, lease: Lease) -> None:
        """The replica has nothing to do with this lease any more."""
        replica = self.get(name)
        if replica is None:
            return
        if replica.samples.get(lease.group) == lease.fence:
            self._let_go(replica, lease.group)
        if replica.keeps.get(lease.group) == lease.fence:
            del replica.keeps[lease.group]

    def _let_go(self, replica: Replica, group: int) -> None:
        del replica.samples[group]
        if not replica.leaving:
            self._placement.gave(replica.member.name)

    # --- who gets a group --------------------------------------------------------------------------------------------

    def choose(self, allowed: Callable[[int], bool], but: str = "") -> Replica | None:
        """The emptiest replica with room whose version is `allowed`; not `but` where another one stays, which is then
        waited for."""
        if but and not any(replica.member.name != but and not replica.leaving for replica in self._by_name.values()):
            but = ""
        chosen = self._placement.choose(allowed, but)
        return None if chosen is None else self._by_name[chosen[0]]

    def lockstep_team(self, version: int, now: float, deadline: float) -> list[Replica]:
        """Who samples a lockstep batch: all replicas at `version`, once none is still given time to get there.

        A replica that has not acknowledged the version `deadline` seconds after its announcement is out of this batch.
        So is, after the first batch, one that has not acknowledged any: it is being started, which may take minutes.
        Empty while somebody is waited for.
        """
        staying = [r for r in self if not r.leaving]
        behind = [r for r in staying if r.version != version and (r.version >= 0 or not self._teamed)]
        if any(now - r.announced < deadline for r in behind):
            return []
        team = [r for r in staying if r.version == version]
        self._teamed = self._teamed or bool(team)
        return team

    # --- leaving -----------------------------------------------------------------------------------------------------

    def leaves(self, replica: Replica) -> None:
        """It gets no more groups."""
        if not replica.leaving:
            replica.leaving = True
            self._leaving.append(replica)
            self._placement.gone(replica.member.name)

    @property
    def all_leave(self) -> bool:
        """Whether nobody is left to sample what is still to be sampled, and nobody is about to come back."""
        left = bool(self._leaving or self._left) and not self._dead
        return left and all(replica.leaving for replica in self._by_name.values())

    def departures(self) -> list[Replica]:
        """Replicas that leave and hold nothing any more; each is named once and forgotten."""
        empty = [r for r in self._leaving if not r.samples and not r.keeps]
        for replica in empty:
            self._leaving.remove(replica)
            self._left += 1
            del self._by_name[replica.member.name]
        return empty
