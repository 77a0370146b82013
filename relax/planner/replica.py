"""A rollout replica as discrete events: admission, samples in their slots, new weights while some of them run."""

from collections import deque
from collections.abc import Callable

from relax.planner.events import Events
from relax.planner.setting import Setting
from relax.planner.slots import Run, Slots


class Replica:
    """A replica as its own process sees it. `version` is the one it serves, `newest` the one announced last.

    It calls `ended` when a group's last sample has ended, and `serving` with its name, the version that it has loaded
    and the groups that went on through the load.
    """

    def __init__(
        self,
        name: str,
        speed: float,
        setting: Setting,
        events: Events,
        ended: Callable[[Run], None],
        serving: Callable[[str, int, frozenset[int]], None],
    ) -> None:
        self.name, self.slots = name, Slots(setting.slots, speed)
        self.version = self.newest = -1
        self._setting, self._events, self._ended, self._serving = setting, events, ended, serving
        self._loading = False
        self._waiting: deque[Run] = deque()  # for admission

    @property
    def _open(self) -> bool:
        return not self._loading and self.version == self.newest >= 0

    # --- groups ------------------------------------------------------------------------------------------------------

    def arrive(self, run: Run) -> None:
        if run.cancelled:
            return
        if self._open:
            self._enter(run)
        else:
            self._waiting.append(run)

    def release(self, groups: set[int]) -> None:
        """What runs of these groups ends."""
        for run in self.slots.cancel(groups, self._events.now):
            self._expect(run)
        self._update()

    def _enter(self, run: Run) -> None:
        run.oldest = self.version
        self.slots.enter(run, self._events.now)
        self._expect(run)

    def _expect(self, run: Run) -> None:
        self._events.later(run.end - self._events.now, self._end, run, run.end)

    def _end(self, run: Run, expected: float) -> None:
        if run.cancelled or run.end != expected:
            return
        self.slots.leave(run)
        self._ended(run)
        self._update()

    # --- weights -----------------------------------------------------------------------------------------------------

    def announce(self, version: int) -> None:
        self.newest = max(self.newest, version)
        self._update()

    def _update(self) -> None:
        """Load what was announced last, once nothing runs; with partial rollouts at once."""
        if self._loading or self.version == self.newest:
            return
        seconds = self._setting.load_seconds
        if self._setting.partial_rollout:
            if seconds > 0:
                for run in self.slots.pause(seconds, self._events.now):
                    self._expect(run)
        elif self.slots.running:
            return
        self._loading = True
        self._events.after(seconds, self._loaded, self.newest)

    def _loaded(self, version: int) -> None:
        self.version, self._loading = version, False
        now, running = self._events.now, set()
        for run in self.slots.running.values():
            if min(run.starts) < now:
                running.add(run.draw.group)
            if min(run.ends if self._setting.mask_offpolicy else run.starts) >= now:
                # Its first token, or every sample's newest version, is of these weights.
                run.oldest = version
        self._serving(self.name, version, frozenset(running))
        self._update()
        while self._waiting and self._open:
            run = self._waiting.popleft()
            if not run.cancelled:
                self._enter(run)
