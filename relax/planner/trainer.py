"""The actor as discrete events: one batch after the other, and publication beside the next one."""

from collections.abc import Callable, Generator
from typing import Any

import simpy

from relax.gate import Batch
from relax.planner.events import Events
from relax.planner.setting import Setting


class Trainer:
    """It calls `started` and `trained` with a batch, and `stored` with a version of which all bytes are there."""

    def __init__(
        self,
        setting: Setting,
        events: Events,
        started: Callable[[Batch], None],
        trained: Callable[[Batch], None],
        stored: Callable[[int], None],
    ) -> None:
        self._setting, self._events = setting, events
        self._started, self._trained, self._stored = started, trained, stored
        self._batches = simpy.Store(events.env)
        self._wanted, self._publishing = 0, False
        self.busy = 0.0  # seconds
        self.ended_at = 0.0  # of the last batch trained
        events.process(self._train())

    def take(self, batch: Batch) -> None:
        self._batches.put(batch)

    def _train(self) -> Generator[simpy.Event, Any, None]:
        while True:
            batch: Batch = yield self._batches.get()
            self._started(batch)
            self.busy += self._setting.train_seconds
            yield self._events.wait(self._setting.train_seconds)
            self.ended_at = self._events.now
            self._trained(batch)
            version = batch.index + 1
            if version % self._setting.interval == 0:
                self._wanted = version
                self._publish()

    def _publish(self) -> None:
        """Beside the next step; what a newer version overtakes meanwhile is skipped."""
        if not self._publishing:
            self._publishing = True
            self._events.after(self._setting.publish_seconds, self._is_stored, self._wanted)

    def _is_stored(self, version: int) -> None:
        self._publishing = False
        self._stored(version)
        if self._wanted > version:
            self._publish()
