"""The clock of a plan, and what is to happen on it."""

from collections.abc import Callable, Generator
from typing import Any

import simpy


class Events:
    """Discrete events in seconds of the plan. `count` says how many there were."""

    def __init__(self) -> None:
        self.env = simpy.Environment()
        self.count = 0

    @property
    def now(self) -> float:
        return float(self.env.now)

    def after(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        """`act` in so many seconds; at once where there are none, so that a way of no length costs no event."""
        if seconds <= 0:
            act(*args)
        else:
            self.later(seconds, act, *args)

    def later(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        """The same, and never before what is under way now is done."""
        self.count += 1
        self.env.timeout(seconds).callbacks.append(lambda _: act(*args))

    def wait(self, seconds: float) -> simpy.Event:
        """To be yielded by a process."""
        self.count += 1
        return self.env.timeout(seconds)

    def process(self, steps: Generator[simpy.Event, Any, None]) -> None:
        self.env.process(steps)

    def run(self) -> None:
        """Everything, until nothing is left to happen."""
        self.env.run()
