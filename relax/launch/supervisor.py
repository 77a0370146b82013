"""Starts the processes of a run, watches them, and leaves none behind.

A run goes through: starting -> running -> (ended | failed | interrupted) -> stopping -> swept. `failed` is the first
process that ends with another code than 0 and is not started again, or one other than a replica that ends before the
run does.

A service that may be started again is, within its budget: what its dead life left is killed, and the new one has the
same name and command. A service that lives shows it (a file that it touches); one that has not for the peer timeout is
killed, and then like any other that died.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from relax.config.budget import RestartBudget
from relax.config.schema import REPLICATED
from relax.launch.guard import Guard
from relax.launch.plan import ProcessPlan
from relax.launch.rundir import RunDir
from relax.launch.stopping import StopSignals
from relax.launch.sweep import kill_session, sweep

POLL_SECONDS = 0.1
# After the controller's success, how long the others may take to end by themselves.
LINGER_SECONDS = 4.0
# From the end of the run (success, failure, signal) to SIGKILL. With the rounds of the sweep, all is over in 10 s.
END_SECONDS = 6.5
# However late it is, a service has this long from SIGTERM to SIGKILL.
LEAST_STOP_SECONDS = 1.0
# How long after its death a service is started again, twice as long after each, and at most.
BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 10.0
# A service that is ending has bounds of its own within this.
ENDING_SECONDS = 15.0
# After so long between two looks it is the launcher that was held up.
HELD_UP_SECONDS = 2.0
NO_RESTARTS = RestartBudget(0, 1.0)
# Exit code of a service that was refused, or told that the run has failed.
IN_VAIN = 2


@dataclass(slots=True)
class Child:
    """A service, through all its lives. `began` are the starts that the budget still counts (monotonic seconds and wall
    time), with the one before them in front; `again_at` is when the next one begins, None while there is no reason.
    `sign` and `seen` are the last sign of life and when it changed, `shown` whether there was any, `hung` how long it
    was silent, once it was killed for that. Times without a zone are monotonic seconds."""

    plan: ProcessPlan
    process: subprocess.Popen[bytes]
    ended_at: datetime | None = None
    began: list[tuple[float, datetime]] = field(default_factory=list)
    restarts: int = 0
    again_at: float | None = None
    sign: int | None = None
    shown: bool = False
    seen: float = 0.0
    hung: float | None = None

    @property
    def name(self) -> str:
        return self.plan.name

    def how(self) -> str:
        """`ended with exit code 3`, `was killed by SIGSEGV`."""
        code = self.process.returncode
        if code is None:
            return "is running"
        if self.hung is not None:
            return f"gave no sign of life for {self.hung:.0f} s and was killed"
        if code == IN_VAIN:
            return f"ended with exit code {code}: it was refused, or told that the run has failed"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `code` is the launcher's exit code; `failed` the services that are to blame, earliest first,
    and how each of them ended."""

    code: int
    text: str
    failed: dict[str, str] = field(default_factory=dict)
    ended_at: dict[str, datetime] = field(default_factory=dict)
    since: dict[str, datetime] = field(default_factory=dict)  # where a service's errors count from: older were survived


class Supervisor:
    """Supervises the processes of one host. Use `run`; nothing else needs to be called.

    `restarted` are the roles whose services are started again, at most as `budget` says. `tick` is called several times
    a second with the children, for the progress view.
    """

    def __init__(
        self,
        run: RunDir,
        plans: Sequence[ProcessPlan],
        *,
        mark: str,
        signals: StopSignals,
        peer_timeout: float = 60.0,
        startup_timeout: float = 300.0,
        budget: RestartBudget = NO_RESTARTS,
        restarted: Collection[str] = (),
        tick: Callable[[Sequence[Child]], None] = lambda children: None,
    ) -> None:
        self.mark = mark
        self.run_dir = run
        self.plans = plans
        self.peer_timeout = peer_timeout
        self.startup_timeout = startup_timeout
        self.budget = budget
        self.restarted = restarted
        self.tick = tick
        self.children: list[Child] = []
        self._signals = signals
        self._ended: float | None = None
        self._sessions: set[int] = set()
        self._looked = time.monotonic()

    def run(self) -> Outcome:
        """Runs everything to its end and clears up. The signals must be such as are only noted.

        A controller that ends with 0 ends the run; without a controller on this host the run ends when all processes
        have ended with 0.
        """
        guard = Guard(self.mark, self.run_dir.runtime_dir, self.run_dir.shm_dir)
        try:
            try:
                for plan in self.plans:
                    if self._signals.first is None:
                        self.children.append(child := Child(plan, self._start(plan, guard)))
                        self._begins(child)
                outcome = self._watch(guard)
            finally:
                self._stop(self._ended or time.monotonic())
        finally:
            self.run_dir.leave()
            guard.dismiss()
        return Outcome(
            outcome.code,
            outcome.text,
            outcome.failed,
            {c.name: c.ended_at for c in self.children if c.ended_at},
            # The errors of lives that were survived are not why the run ended; all that the spent budget counts are.
            {c.name: c.began[0 if c.name in outcome.failed else -1][1] for c in self.children if c.restarts},
        )

    def _start(self, plan: ProcessPlan, guard: Guard) -> subprocess.Popen[bytes]:
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
        self._sessions.add(process.pid)
        return process

    @staticmethod
    def _begins(child: Child) -> None:
        child.seen = time.monotonic()
        child.began.append((child.seen, datetime.now(UTC)))

    # --- lives -------------------------------------------------------------------------------------------------------

    def _again(self, child: Child, guard: Guard) -> bool:
        """Whether a child that failed is started again, now or soon."""
        if child.again_at is not None:
            return True
        if child.process.returncode == IN_VAIN:
            return False
        now = time.monotonic()
        while len(child.began) > 1 and now - child.began[1][0] >= self.budget.seconds:
            del child.began[0]
        spent = len(child.began) - 1
        if child.plan.role not in self.restarted or spent >= self.budget.restarts:
            return False
        self._clear_up_after(child, guard)
        child.again_at = time.monotonic() + min(BACKOFF_SECONDS * 2**spent, LONGEST_BACKOFF_SECONDS)
        print(f"{child.name} {child.how()}; it is started again", file=sys.stderr, flush=True)
        return True

    def _clear_up_after(self, child: Child, guard: Guard) -> None:
        """Kills what a life that has ended left. From then on its session is not this run's: the system gives the
        number to somebody else."""
        kill_session(child.process.pid)
        self._sessions.discard(child.process.pid)
        guard.forget(child.process.pid)

    def _clear_up_after_the_gone(self, guard: Guard) -> None:
        """After replicas that left the run, once what they started had its time to end."""
        end = datetime.now(UTC) - timedelta(seconds=ENDING_SECONDS)
        for child in self.children:
            gone = child.process.returncode == 0 and child.ended_at is not None and child.ended_at < end
            if gone and child.process.pid in self._sessions:
                self._clear_up_after(child, guard)

    def _restart(self, guard: Guard) -> None:
        """The next lives of those whose time has come. Nothing of the last one is left by then."""
        for child in self.children:
            if child.again_at is None or time.monotonic() < child.again_at:
                continue
            self.run_dir.sign_of_life(child.name).unlink(missing_ok=True)
            child.process = self._start(child.plan, guard)
            child.ended_at = child.again_at = child.sign = child.hung = None
            child.shown = False
            child.restarts += 1
            self._begins(child)

    def _kill_the_hung(self) -> None:
        """Who has shown no sign of life for the peer timeout, or has not begun to within the startup timeout."""
        now, before = time.monotonic(), self._looked
        self._looked = now
        for child in self.children:
            if child.process.returncode is not None:
                continue
            if now - before > HELD_UP_SECONDS:
                child.seen += now - before  # we could see nobody
            sign = self._sign(child)
            if sign != child.sign:
                child.sign, child.seen, child.shown = sign, now, True
            # It takes its sign away when it is ending.
            without = ENDING_SECONDS if child.shown else self.startup_timeout
            silent = now - child.seen
            if silent > (self.peer_timeout if sign is not None else without):
                child.hung = silent
                os.killpg(child.process.pid, signal.SIGKILL)

    def _sign(self, child: Child) -> int | None:
        try:
            return self.run_dir.sign_of_life(child.name).stat().st_mtime_ns
        except FileNotFoundError:
            return None

    # --- the run -----------------------------------------------------------------------------------------------------

    def _watch(self, guard: Guard) -> Outcome:
        controller = next((child for child in self.children if child.plan.role == "controller"), None)
        while True:
            if (stopped := self._signals.first) is not None:
                return Outcome(128 + stopped, f"stopped by {stopped.name}")
            self._poll()
            self._kill_the_hung()
            failed = self._failed()
            if [child for child in failed if not self._again(child, guard)]:
                return self._failure(failed)
            if controller is not None and controller.process.returncode == 0:
                return self._linger(guard)
            running = [child for child in self.children if child.process.returncode is None]
            if controller is None and not running and not failed:
                return Outcome(0, "every service of this node has ended")
            if controller is not None and (early := self._ended_too_early()):
                how = f"ended {self.peer_timeout:g} s ago and the run goes on without it"
                return Outcome(1, f"{early[0].name} {how}", dict.fromkeys((child.name for child in early), how))
            self._restart(guard)
            self._clear_up_after_the_gone(guard)
            self.tick(self.children)
            time.sleep(POLL_SECONDS)

    def _linger(self, guard: Guard) -> Outcome:
        """The work is done; what ends now with an error still makes the run a failure."""
        self._ended = time.monotonic()
        end = self._ended + LINGER_SECONDS
        while time.monotonic() < end and self._signals.first is None:
            self._poll()
            # Who was about to be started again is not needed any more.
            if failed := [child for child in self._failed() if not self._again(child, guard)]:
                return self._failure(failed)
            if all(child.process.returncode == 0 or child.again_at is not None for child in self.children):
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
        """A replica may leave the run; the controller, which knows the others, ends a run that has none. Who
        waits to be started again, perhaps for longer than this, has not ended."""
        end = datetime.now(UTC) - timedelta(seconds=self.peer_timeout)
        ended = [c for c in self.children if c.ended_at and c.ended_at < end and c.again_at is None]
        return [c for c in ended if c.plan.role not in REPLICATED]

    def _stop(self, ended: float) -> None:
        """SIGTERM to every service, a bounded wait, SIGKILL to what is left, then the sweep for their descendants.

        Another signal (a second Ctrl-C) ends the wait.
        """
        for child in self.children:
            if child.process.poll() is None:
                child.process.terminate()
        end = max(ended + END_SECONDS, time.monotonic() + LEAST_STOP_SECONDS)
        seen = self._signals.count
        while time.monotonic() < end and self._signals.count == seen:
            self._poll()
            if all(child.ended_at for child in self.children):
                break
            time.sleep(POLL_SECONDS / 2)
        for child in self.children:
            if child.process.poll() is None:
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
        sweep(self.mark, self._sessions, term_seconds=1.0)
