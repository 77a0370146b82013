"""Which replica gets the next group: of those that have room and that the gate allows, the emptiest."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Seat:
    version: int
    credit: int  # groups at a time
    held: int = 0


class Placement:
    """The loads of the replicas, kept so that a choice among a thousand of them costs no more than one among ten.

    A replica's load is the share of its credit that is taken; equal loads go by name. The gate's answer depends on
    the version alone, so it is asked once a version, not once a replica.
    """

    def __init__(self) -> None:
        self._seats: dict[str, _Seat] = {}
        self._heaps: dict[int, list[tuple[float, str]]] = {}  # version -> loads, outdated ones among them
        self._listed: set[tuple[int, float, str]] = set()  # what the heaps hold

    def serves(self, name: str, version: int, credit: int) -> None:
        """The replica has acknowledged `version`; a new one has nothing yet."""
        seat = self._seats.setdefault(name, _Seat(version, credit))
        seat.version, seat.credit = version, credit
        self._list(name, seat)

    def gone(self, name: str) -> None:
        """The replica gets no more groups, and what it held is nobody's."""
        self._seats.pop(name, None)

    def took(self, name: str) -> None:
        seat = self._seats[name]
        seat.held += 1
        self._list(name, seat)

    def gave(self, name: str) -> None:
        """A group that the replica held has ended, or left it."""
        seat = self._seats[name]
        seat.held -= 1
        self._list(name, seat)

    def choose(self, allowed: Callable[[int], bool], but: str = "") -> tuple[str, int] | None:
        """Name and version of the emptiest replica with room whose version is `allowed`, any `but` this one."""
        best: tuple[float, str, int] | None = None
        for version in list(self._heaps):
            top = self._top(version, but)
            if top is not None and (best is None or top < best[:2]) and allowed(version):
                best = (*top, version)
        return None if best is None else best[1:]

    def _top(self, version: int, but: str) -> tuple[float, str] | None:
        heap = self._heaps[version]
        passed_over: tuple[float, str] | None = None
        top: tuple[float, str] | None = None
        while heap and top is None:
            load, name = heap[0]
            seat = self._seats.get(name)
            if seat is None or seat.version != version or not seat.held / seat.credit == load < 1:
                heapq.heappop(heap)
                self._listed.discard((version, load, name))
            elif name == but:
                passed_over = heapq.heappop(heap)
            else:
                top = heap[0]
        if passed_over is not None:
            heapq.heappush(heap, passed_over)
        if not heap:
            del self._heaps[version]
        return top

    def _list(self, name: str, seat: _Seat) -> None:
        key = (seat.version, seat.held / seat.credit, name)
        if key[1] < 1 and key not in self._listed:
            self._listed.add(key)
            heapq.heappush(self._heaps.setdefault(seat.version, []), key[1:])
