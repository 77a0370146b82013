"""Notices that a service does not get on, from a thread of its own: the loop may be what hangs."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

LOOK_SECONDS = 1.0
# A thread that wakes up this much late was stopped with its process: nobody could get on meanwhile.
ASLEEP_SECONDS = 3.0


class Watchdog:
    """Calls `stalled(problem)` when a piece of work has not moved for `timeout` seconds, or the loop has not run.

    Work is what happens between the ends of `work()`; `moved()` says that it gets on. What waits for another service
    is no work of this one. `clock` is in seconds and only rises.
    """

    def __init__(
        self, timeout: float, stalled: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout, self._stalled, self._clock = timeout, stalled, clock
        self._works = 0
        self._moved = self._looked = clock()
        self._loop_ran: float | None = None
        self._over = threading.Event()

    def start(self) -> None:
        self._looked = self._clock()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def loop_runs(self) -> None:
        self._loop_ran = self._clock()

    def moved(self) -> None:
        self._moved = self._clock()

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        self._works += 1
        self.moved()
        try:
            yield
        finally:
            self._works -= 1
            self.moved()

    def look(self) -> str | None:
        """What is wrong now."""
        now = self._clock()
        asleep = now - self._looked
        self._looked = now
        if asleep > ASLEEP_SECONDS:
            self._moved += asleep
            if self._loop_ran is not None:
                self._loop_ran += asleep
        limit = f"--stall-timeout {self._timeout:g} s"
        if self._loop_ran is not None and now - self._loop_ran > self._timeout:
            return f"has not looked at a message for {limit}"
        if self._works and now - self._moved > self._timeout:
            return f"has not got on with its work for {limit}"
        return None

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            problem = self.look()
            if problem is not None:
                self._stalled(problem)
                return
