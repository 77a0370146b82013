"""The rollout replicas as the controller sees them, and which of them gets the next group."""

from collections.abc import Iterator
from dataclasses import dataclass

from relax.protocol.messages import Member


@dataclass(slots=True)
class Replica:
    """`version` is the newest acknowledged, -1 before the first; `capacity` how many groups it takes at a time;
    `sampling` how many it has; `announced` when (monotonic seconds) the newest version was announced to it."""

    member: Member
    version: int = -1
    capacity: int = 0
    sampling: int = 0
    announced: float = 0.0


class Replicas:
    def __init__(self) -> None:
        self._by_name: dict[str, Replica] = {}

    def __iter__(self) -> Iterator[Replica]:
        return iter(sorted(self._by_name.values(), key=lambda r: r.member.name))

    def joined(self, member: Member) -> Replica:
        """A new life of a replica: it holds nothing and serves nothing yet."""
        replica = self._by_name[member.name] = Replica(member)
        return replica

    def get(self, name: str | None) -> Replica | None:
        return self._by_name.get(name or "")

    def with_room(self) -> list[Replica]:
        """Replicas that would take another group, the emptiest first."""
        open_ = [r for r in self._by_name.values() if r.version >= 0 and r.sampling < r.capacity]
        return sorted(open_, key=lambda r: (r.sampling / r.capacity, r.member.name))

    def serving(self, version: int) -> list[Replica]:
        return [r for r in self if r.version == version]

    def lockstep_team(self, version: int, now: float, deadline: float) -> list[Replica]:
        """Who samples a lockstep batch: all replicas at `version`, once none is still given time to get there.

        A replica that has not acknowledged the version `deadline` seconds after its announcement is out of this batch.
        Empty while somebody is waited for.
        """
        late = [r for r in self if r.version != version]
        if any(now - r.announced < deadline for r in late):
            return []
        return self.serving(version)
