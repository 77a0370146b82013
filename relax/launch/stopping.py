"""SIGINT, SIGTERM and SIGHUP to a launcher: whenever they come, the run ends in one way and nothing of it is left."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

KINDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal came where nothing had to be cleared up."""

    def __init__(self, kind: signal.Signals) -> None:
        super().__init__(kind.name)
        self.kind = kind


class StopSignals:
    """The signals that have come: `first`, and how many they are.

    While there is nothing to clear up, the first raises `Stopped` where it comes; within `noted` it is only noted, for
    whoever is there to look at it.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.count = 0
        self._raise = True

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.first = self.first or signal.Signals(number)
        self.count += 1
        if self._raise:
            raise Stopped(self.first)

    @contextmanager
    def noted(self) -> Iterator[None]:
        before, self._raise = self._raise, False
        try:
            yield
        finally:
            self._raise = before


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Catches them until the block ends. In the main thread."""
    signals = StopSignals()
    earlier: dict[signal.Signals, Any] = {kind: signal.signal(kind, signals) for kind in KINDS}
    try:
        yield signals
    finally:
        for kind, handler in earlier.items():
            signal.signal(kind, handler)
