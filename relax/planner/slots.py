"""A simulated replica: slots that run samples first come, first served, one sample a slot.

When a group enters, the ends of its samples are known: nothing that comes later can overtake them. So a replica costs
one event a group, not one a sample. Only a cancelled group or a pause moves ends, and then the rest is dealt out anew.
"""

import heapq
from dataclasses import dataclass, field

from relax.planner.draws import Draw


@dataclass(slots=True, eq=False)
class Run:
    """A draw at a replica, the `holder`. `oldest` is the oldest version that samples any of its (unmasked) tokens,
    `starts` and `ends` are those of its samples, in seconds of the plan."""

    draw: Draw
    holder: str
    tokens: tuple[int, ...]
    oldest: int = -1
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    end: float = 0.0
    cancelled: bool = False

    def deal(self, slots: list[float], now: float, speed: float) -> None:
        """Takes the slots that are free first; `slots` is the heap of times at which each of them is."""
        starts, ends = [], []
        for tokens in self.tokens:
            start = slots[0] if slots[0] > now else now
            end = start + tokens / speed
            heapq.heapreplace(slots, end)
            starts.append(start)
            ends.append(end)
        self.starts, self.ends, self.end = starts, ends, max(ends)


class Slots:
    """The slots of one replica and the groups that have entered, in their order."""

    def __init__(self, count: int, speed: float) -> None:
        self.speed = speed
        self.running: dict[int, Run] = {}
        self.busy = 0.0  # slot-seconds of ended and cancelled samples
        self._free = [0.0] * count

    def enter(self, run: Run, now: float) -> None:
        run.deal(self._free, now, self.speed)
        self.running[run.draw.group] = run

    def leave(self, run: Run) -> None:
        """Every sample of the group has ended."""
        del self.running[run.draw.group]
        self.busy += sum(run.tokens) / self.speed

    def cancel(self, groups: set[int], now: float) -> list[Run]:
        """Ends the samples of these groups; returns the runs whose end has changed by it."""
        for group in groups & self.running.keys():
            run = self.running.pop(group)
            for tokens, start, end in zip(run.tokens, run.starts, run.ends, strict=True):
                if start < now:
                    self.busy += tokens / self.speed - max(0.0, end - now)
        before = {group: run.end for group, run in self.running.items()}
        self._deal_again(now)
        return [run for group, run in self.running.items() if run.end != before[group]]

    def pause(self, seconds: float, now: float) -> list[Run]:
        """Nothing runs for so long; returns the runs whose end has changed."""
        self._free = [max(free, now) + seconds for free in self._free]
        for run in self.running.values():
            run.starts = [start if start < now else start + seconds for start in run.starts]
            run.ends = [end if end <= now else end + seconds for end in run.ends]
            run.end = max(run.ends)
        return list(self.running.values())

    def _deal_again(self, now: float) -> None:
        runs = list(self.running.values())
        started = [
            end for run in runs for start, end in zip(run.starts, run.ends, strict=True) if start < now and end > now
        ]
        self._free = started + [now] * (len(self._free) - len(started))
        heapq.heapify(self._free)
        for run in runs:
            for i, tokens in enumerate(run.tokens):
                if run.starts[i] >= now:
                    run.starts[i] = self._free[0]
                    run.ends[i] = run.starts[i] + tokens / self.speed
                    heapq.heapreplace(self._free, run.ends[i])
            run.end = max(run.ends)
