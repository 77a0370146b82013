"""Starts the processes of a run, watches them, and leaves none behind.

A run goes through: starting -> running -> (ended | failed | interrupted) -> stopping -> swept. `failed` is the first
process that ends with another code than 0, or one other than a rollout replica that ends before the run does.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import FrameType
from typing import Any

from relax.launch.guard import Guard
from relax.launch.plan import ProcessPlan
from relax.launch.rundir import RunDir
from relax.launch.sweep import sweep

POLL_SECONDS = 0.1
# After the controller's success, how long the others may take to end by themselves.
LINGER_SECONDS = 4.0
# From the end of the run (success, failure, signal) to SIGKILL. With the rounds of the sweep, all is over in 10 s.
END_SECONDS = 6.5
# However late it is, a service has this long from SIGTERM to SIGKILL.
LEAST_STOP_SECONDS = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class Child:
    plan: ProcessPlan
    process: subprocess.Popen[bytes]
    ended_at: datetime | None = None

    @property
    def name(self) -> str:
        return self.plan.name

    def how(self) -> str:
        """`ended with exit code 3`, `was killed by SIGSEGV`."""
        code = self.process.returncode
        if code is None:
            return "is running"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `code` is the launcher's exit code; `failed` the services that are to blame, earliest first,
    and how each of them ended."""

    code: int
    text: str
    failed: dict[str, str] = field(default_factory=dict)
    ended_at: dict[str, datetime] = field(default_factory=dict)


class Supervisor:
    """Supervises the processes of one host. Use `run`; nothing else needs to be called.

    `tick` is called several times a second with the children, for the progress view.
    """

    def __init__(
        self,
        run: RunDir,
        plans: Sequence[ProcessPlan],
        *,
        mark: str,
        peer_timeout: float = 60.0,
        tick: Callable[[Sequence[Child]], None] = lambda children: None,
    ) -> None:
        self.mark = mark
        self.run_dir = run
        self.plans = plans
        self.peer_timeout = peer_timeout
        self.tick = tick
        self.children: list[Child] = []
        self._signal: signal.Signals | None = None
        self._signals = 0
        self._ended: float | None = None

    def run(self) -> Outcome:
        """Runs everything to its end and clears up. Must be called from the main thread.

        A controller that ends with 0 ends the run; without a controller on this host the run ends when all processes
        have ended with 0.
        """
        guard = Guard(self.mark, self.run_dir.runtime_dir, self.run_dir.shm_dir)
        try:
            with self._catching_signals():
                try:
                    for plan in self.plans:
                        self._start(plan, guard)
                    outcome = self._watch()
                finally:
                    self._stop(self._ended or time.monotonic())
        finally:
            self.run_dir.leave()
            guard.dismiss()
        return Outcome(
            outcome.code, outcome.text, outcome.failed, {c.name: c.ended_at for c in self.children if c.ended_at}
        )

    def _start(self, plan: ProcessPlan, guard: Guard) -> None:
        with self.run_dir.out(plan.name).open("ab") as out:
            process = subprocess.Popen(
                plan.command,
                env={**os.environ, **plan.environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        guard.watch(process.pid)
        self.children.append(Child(plan, process))

    def _watch(self) -> Outcome:
        controller = next((child for child in self.children if child.plan.role == "controller"), None)
        while True:
            if self._signal is not None:
                return Outcome(128 + self._signal, f"stopped by {self._signal.name}")
            self._poll()
            if failed := self._failed():
                return self._failure(failed)
            if controller is not None and controller.process.returncode == 0:
                return self._linger()
            running = [child for child in self.children if child.process.returncode is None]
            if controller is None and not running:
                return Outcome(0, "every service of this node has ended")
            if controller is not None and (early := self._ended_too_early()):
                how = f"ended {self.peer_timeout:g} s ago and the run goes on without it"
                return Outcome(1, f"{early[0].name} {how}", dict.fromkeys((child.name for child in early), how))
            self.tick(self.children)
            time.sleep(POLL_SECONDS)

    def _linger(self) -> Outcome:
        """The work is done; what ends now with an error still makes the run a failure."""
        self._ended = time.monotonic()
        end = self._ended + LINGER_SECONDS
        while time.monotonic() < end and self._signal is None:
            self._poll()
            if failed := self._failed():
                return self._failure(failed)
            if all(child.process.returncode == 0 for child in self.children):
                break
            self.tick(self.children)
            time.sleep(POLL_SECONDS)
        self.tick(self.children)
        return Outcome(0, "the run has ended")

    def _poll(self) -> None:
        for child in self.children:
            if child.ended_at is None and child.process.poll() is not None:
                child.ended_at = datetime.now(UTC)

    def _failed(self) -> list[Child]:
        failed = [child for child in self.children if child.process.returncode not in (None, 0)]
        return sorted(failed, key=lambda child: child.ended_at or datetime.now(UTC))

    def _failure(self, failed: Sequence[Child]) -> Outcome:
        text = "; ".join(f"{child.name} {child.how()}" for child in failed)
        return Outcome(1, text, {child.name: child.how() for child in failed})

    def _ended_too_early(self) -> list[Child]:
        """A rollout replica may leave the run; the controller, which knows the others, ends a run that has none."""
        end = datetime.now(UTC) - timedelta(seconds=self.peer_timeout)
        return [c for c in self.children if c.ended_at and c.ended_at < end and c.plan.role != "rollout"]

    def _stop(self, ended: float) -> None:
        """SIGTERM to every service, a bounded wait, SIGKILL to what is left, then the sweep for their descendants.

        Another signal (a second Ctrl-C) ends the wait.
        """
        for child in self.children:
            if child.process.poll() is None:
                child.process.terminate()
        end = max(ended + END_SECONDS, time.monotonic() + LEAST_STOP_SECONDS)
        seen = self._signals
        while time.monotonic() < end and self._signals == seen:
            self._poll()
            if all(child.ended_at for child in self.children):
                break
            time.sleep(POLL_SECONDS / 2)
        for child in self.children:
            if child.process.poll() is None:
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
        sweep(self.mark, {child.process.pid for child in self.children}, term_seconds=1.0)

    @contextmanager
    def _catching_signals(self) -> Iterator[None]:
        def note(number: int, _frame: FrameType | None) -> None:
            self._signal = self._signal or signal.Signals(number)
            self._signals += 1

        earlier: dict[signal.Signals, Any] = {kind: signal.signal(kind, note) for kind in STOP_SIGNALS}
        try:
            yield
        finally:
            for kind, handler in earlier.items():
                signal.signal(kind, handler)
