"""Notices that a service does not get on, from a thread of its own: the loop may be what hangs."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

LOOK_SECONDS = 1.0
# A thread that wakes up this much late was stopped with its process: nobody could get on meanwhile.
ASLEEP_SECONDS = 3.0


@dataclass(slots=True)
class _Work:
    """One kind of work. `begun` pieces are under way, `since` when (None: none is); `still` are the seconds in which
    there was work and none of it moved, until then."""

    begun: int = 0
    since: float | None = None
    still: float = 0.0


class Watchdog:
    """Calls `stalled(problem)` when there was work of a kind for `timeout` seconds and none of it moved, or when the
    loop has not run for so long.

    Work is what happens between the ends of `work(kind)`, and it has moved when a piece of it is done; `moved(kind)`
    says that it gets on. `under_way(kind)` is for what may be given up: its end says nothing, so that a service that
    brings nothing to its end is found although others take its work away from it and give it more. What waits for
    another service is no work of this one. `clock` is in seconds and only rises.
    """

    def __init__(
        self, timeout: float, stalled: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout, self._stalled, self._clock = timeout, stalled, clock
        self._works: dict[str, _Work] = {}
        self._looked = clock()
        self._loop_ran: float | None = None
        self._over = threading.Event()

    def start(self) -> None:
        self._looked = self._clock()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def loop_runs(self) -> None:
        self._loop_ran = self._clock()

    def moved(self, kind: str) -> None:
        work = self._of(kind)
        work.still, work.since = 0.0, self._clock() if work.begun else None

    @contextlib.contextmanager
    def work(self, kind: str) -> Iterator[None]:
        with self.under_way(kind):
            yield
        self.moved(kind)

    @contextlib.contextmanager
    def under_way(self, kind: str) -> Iterator[None]:
        work = self._of(kind)
        if not work.begun:
            work.since = self._clock()
        work.begun += 1
        try:
            yield
        finally:
            work.begun -= 1
            if not work.begun and work.since is not None:
                since, work.since = work.since, None
                work.still += self._clock() - since

    def _of(self, kind: str) -> _Work:
        return self._works.setdefault(kind, _Work())

    def look(self) -> str | None:
        """What is wrong now."""
        now = self._clock()
        asleep = now - self._looked
        self._looked = now
        works = list(self._works.items())
        if asleep > ASLEEP_SECONDS:
            if self._loop_ran is not None:
                self._loop_ran += asleep
            for _, work in works:
                if work.since is not None:
                    work.since += asleep
        limit = f"--stall-timeout {self._timeout:g} s"
        if self._loop_ran is not None and now - self._loop_ran > self._timeout:
            return f"has not looked at a message for {limit}"
        for kind, work in works:
            since = work.since
            if work.still + (0.0 if since is None else now - since) > self._timeout:
                return f"has not got on with {kind} for {limit}"
        return None

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            problem = self.look()
            if problem is not None:
                self._stalled(problem)
                return
