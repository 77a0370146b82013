"""What every service process is: a mailbox, a membership, a heartbeat, and one way to end.

A subclass says what it receives (`handlers`), what it does before it can (`prepare`) and what it lets go (`release`).
Everything else, from the first `Register` to the exit code, is here and the same for all.
"""

import asyncio
import contextlib
import faulthandler
import itertools
import json
import math
import os
import secrets
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import structlog
import uvloop

from relax.config.options import Options
from relax.config.schema import REPLICATED
from relax.launch.process import die_with_parent
from relax.launch.rundir import PER_SERVICE, RunDir
from relax.launch.sweep import MARK
from relax.protocol.core import Bounds
from relax.protocol.errors import PeerError, PeerForgotten, ProtocolError
from relax.protocol.faults import Faults
from relax.protocol.mailbox import Mailbox
from relax.protocol.messages import (
    Heartbeat,
    HeartbeatReceived,
    Holdings,
    Inventory,
    Lease,
    Leaving,
    Member,
    Members,
    Register,
    Registered,
    Shutdown,
)
from relax.protocol.payload import Arrays, Payload, PayloadStore
from relax.protocol.security import Security
from relax.services.memory import resident_bytes
from relax.services.milestone import Milestone
from relax.services.watchdog import Watchdog

HEARTBEAT_SECONDS = 0.5
# How often a service measures its memory: 2 ms on a machine of 100 processes, all of which are looked at.
MEMORY_SECONDS = 5.0
# Faults that the mailbox injects, for tests; see relax.protocol.faults.
FAULTS = "RELAX_FAULTS"
# Exit code of a service that did not get on with its work, or whose loop hung.
STALLED = 75
# Of one that was refused, or told that the run has failed: it is not to be started again.
IN_VAIN = 2
# Lives that ended, by endpoint, which are remembered: none of them is asked again.
GONE = 1024
# How long a service may take to say its last words, and again to let go of what it holds. The launcher, which promises
# an end within 10 s, allows for both.
RELEASE_SECONDS = 2.5
# How long the controller may take to hear that a replica leaves. At the end of a run it may be gone already, and the
# launcher's promise of an end covers this too.
LEAVE_SECONDS = 2.0
# After so long a service that is ending is ended, wherever it hangs.
STUCK_SECONDS = 6.0


class ServiceError(Exception):
    """The end of a service for a reason its user can act on; printed without a traceback."""

    code: ClassVar[int] = 1


class NotAdmitted(ServiceError):
    """The controller is not there, or takes no such service into the run."""

    code = IN_VAIN


@dataclass(frozen=True, slots=True)
class Context:
    """What a service process is told at start."""

    name: str
    options: Options
    run: RunDir
    node: str
    controller: str  # the controller's endpoint
    host: str | None  # the address that other hosts reach this node by; None when the run stays on one host
    model_options: Options  # `options` with the parallel sizes of this service's own model
    engine: str = ""  # of a rollout replica or the actor
    index: int = 0  # among the services of its role
    security: Security = field(default_factory=Security)  # keys for connections beyond this host
    lineage: int = 0
    cut: int = 0  # the batch that this lineage begins at
    checkpoint: Path | None = None  # what its models begin with: the run's own at `cut`, at batch 0 --load


class Service:
    """One service process. `main` returns its exit code."""

    role: ClassVar[str]

    def __init__(self, context: Context) -> None:
        self.context = context
        self.name = context.name
        self.options = context.options
        self.run = context.run
        self.lineage = context.lineage
        self.incarnation = secrets.token_hex(4)
        self.log = structlog.get_logger().bind(run=context.run.run_id)
        self.members: dict[str, Member] = {}
        self._of_role: dict[str, list[Member]] = {}
        self.counters: dict[str, float] = defaultdict(float)  # they only grow, and travel with every heartbeat
        self.gauges: dict[str, float] = {}  # measured now and then; they travel too
        self.activity = "starting"
        self.clean = False  # told to end, not failed: `release` may say goodbye to others
        self.leaving = False
        self.num_batches: int | None = None
        self._worked_on: set[tuple[Lease, ...]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._members_changed = asyncio.Event()
        self._gone: deque[str] = deque(maxlen=GONE)
        self.watchdog = Watchdog(self.options.stall_timeout, self._stalled)
        self._ended: asyncio.Future[int]

    # --- what a subclass fills in ------------------------------------------------------------------------------------

    def handlers(self) -> dict[type, Any]:
        """Message class -> async handler(message, sender)."""
        raise NotImplementedError

    async def prepare(self) -> None:
        """Load what the service needs. It is a member already and its messages wait in the mailbox."""

    def holds(self) -> Iterable[Lease]:
        """The draws that wait here, beside those that something is `working_on` (see `Inventory`)."""
        return ()

    def unfinished(self) -> int:
        """How many groups a replica that leaves has begun and not finished."""
        return len(self._worked_on)

    async def hand_back(self) -> None:
        """What a replica does when the controller knows that it leaves. Its end comes with `Shutdown`, when nothing is
        held here any more; and to everybody when the run or the controller itself ends."""

    async def release(self) -> None:
        """Let go of engines, pools and threads. Runs once, bounded, however the service ends."""

    # --- life --------------------------------------------------------------------------------------------------------

    @classmethod
    def start(cls, context: Context) -> int:
        """Run the service to its end in this process and return the exit code."""
        if MARK in os.environ:
            die_with_parent(signal.SIGTERM)
        return uvloop.run(cls(context).main())

    async def main(self) -> int:
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        self.mailbox = Mailbox(
            self.name,
            run_id=self.run.run_id,
            lineage=self.lineage,
            incarnation=self.incarnation,
            bind=self.bind(),
            bounds=Bounds(peer_timeout=self.options.peer_timeout),
            security=self.context.security,
            faults=Faults.parse(os.environ[FAULTS]) if FAULTS in os.environ else None,
        )
        code = 1
        try:
            await self.mailbox.start()
            self.mailbox.on(Members, self._on_members)
            self.mailbox.on(Shutdown, self._on_shutdown)
            self.mailbox.on(Inventory, self._on_inventory)
            self._watch(self.mailbox.failed)
            for message, handler in self.handlers().items():
                self.mailbox.on(message, handler)
            self.spawn(self._live(), "life")
            self.spawn(self._show_life(), "sign of life")
            self.watchdog.start()
            self.spawn(self._measure(), "measure")
            code = await self._ended
        except (ProtocolError, ServiceError, OSError) as error:
            self.log.error("service_failed", error=str(error))
        finally:
            await self._close(code)
        return code

    async def _live(self) -> None:
        await self.join()
        await self.prepare()
        self.log.info("service_ready", endpoint=self.mailbox.endpoint, pid=os.getpid())

    async def join(self) -> None:
        """Become a member: find the controller, register until it answers, then beat. Returns when it is known who the
        others are."""
        me = Register(
            member=Member(self.name, self.role, self.mailbox.endpoint, self.incarnation),
            node=self.context.node,
            pid=os.getpid(),
            options=shared_options(self.options),
        )
        self.activity = "registering"
        try:
            reply = await self.mailbox.ask(self.context.controller, me, deadline=self.options.startup_timeout)
        except ProtocolError as error:
            raise NotAdmitted(str(error)) from None
        assert isinstance(reply, Registered)
        self.num_batches = reply.num_batches
        self.spawn(self._beat(), "heartbeat")
        while not self.members:  # whether the controller lives is the heartbeat's care
            await self._members_changed.wait()

    async def _beat(self) -> None:
        while True:
            beat = Heartbeat(self.name, self.incarnation, self.activity, dict(self.counters), dict(self.gauges))
            reply = await self.mailbox.ask(self.context.controller, beat, deadline=self.options.peer_timeout)
            assert isinstance(reply, HeartbeatReceived)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _show_life(self) -> None:
        """The launcher and the watchdog see that the loop runs, whatever the controller does."""
        sign = self.run.sign_of_life(self.name)
        try:
            while True:
                self.watchdog.loop_runs()
                sign.touch()
                await asyncio.sleep(HEARTBEAT_SECONDS)
        finally:
            sign.unlink(missing_ok=True)  # from here on the end has its own bound

    def _stalled(self, problem: str) -> None:
        """Called by the watchdog's thread: the loop may be what hangs."""
        self.log.error("service_stalled", error=f"{self.name} {problem}", activity=self.activity)
        faulthandler.dump_traceback(all_threads=True)
        self.run.leave()
        os._exit(STALLED)

    async def _measure(self) -> None:
        while True:
            self.gauges["rss_bytes"] = await asyncio.to_thread(resident_bytes)
            await asyncio.sleep(MEMORY_SECONDS)

    async def _close(self, code: int) -> None:
        self.activity, clean = "ending", code == 0
        self.watchdog.stop()
        self.clean = clean
        # Until the process is gone: threads that the interpreter waits for at its exit are part of the end.
        stuck = threading.Timer(STUCK_SECONDS, self._stuck, (code,))
        stuck.daemon = True
        stuck.start()
        if clean:
            # Less than the bound around it, so that a peer that does not answer is named.
            await self._bounded(self.mailbox.close(deadline=0.8 * RELEASE_SECONDS), "close")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._bounded(self.release(), "release")
        self.mailbox.abort()
        self.run.leave()

    def _stuck(self, code: int) -> None:
        """The end itself does not end. Where it hangs goes to the service's output; what was decided before holds."""
        self.log.warning("ending_stuck", code=code, seconds=STUCK_SECONDS)
        faulthandler.dump_traceback(all_threads=True)
        self.run.leave()
        os._exit(code)

    async def _bounded(self, work: Coroutine[Any, Any, None], what: str) -> None:
        try:
            await asyncio.wait_for(work, RELEASE_SECONDS)
        except (TimeoutError, ProtocolError) as error:
            self.log.warning("ending_not_clean", what=what, error=str(error) or f"over {RELEASE_SECONDS} s")

    # --- tools for subclasses ----------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `work` beside the mailbox; its exception ends the service, so no failure is nobody's."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._watch(task)
        return task

    def send(self, endpoint: str, message: Any) -> None:
        """Tell without waiting for the acknowledgement; only a silent controller ends this service."""
        self.spawn(self.tell(endpoint, message), f"tell {type(message).__name__}")

    async def tell(self, endpoint: str, message: Any) -> None:
        """Returns when the peer has acknowledged it, or is no member any more."""
        if endpoint == self.context.controller:
            await self.mailbox.tell(endpoint, message, deadline=self.options.peer_timeout)
        elif endpoint not in self._gone:
            # What was on its way to a member that is gone is nobody's failure: the ledger knows what did not arrive.
            # Until it is gone, it is the controller that judges its silence.
            with contextlib.suppress(PeerForgotten):
                await self._patiently(self.mailbox.tell(endpoint, message, deadline=math.inf), endpoint, message)

    async def ask(self, endpoint: str, message: Any) -> Any:
        """The reply of a member, however long it takes. Raises PeerForgotten when it is no member any more, PeerError
        when its handler fails.

        For what has no state of its own at the peer: it may be asked again of its next life.
        """
        if endpoint in self._gone:
            raise PeerForgotten(endpoint, type(message).__name__)
        try:
            return await self._patiently(self.mailbox.ask(endpoint, message, deadline=math.inf), endpoint, message)
        except PeerError as error:
            if not error.closing:
                raise
            await self._until_gone(endpoint)
            raise PeerForgotten(endpoint, type(message).__name__) from None

    async def ask_role(self, role: str, message: Any) -> Any:
        """The reply of the service of this role, of its next life where the one that was asked dies."""
        while True:
            member = await self.member(role)
            try:
                return await self.ask(member.endpoint, message)
            except PeerForgotten:
                self.log.warning("asked_again", role=role, message_type=type(message).__name__)

    async def fetch(self, store: PayloadStore, payload: Payload) -> Arrays:
        """The arrays of a payload. Raises what `PayloadStore.fetch` does, PeerForgotten when its producer died."""
        return await store.fetch(payload, ask=self.ask)

    async def _patiently(self, work: Awaitable[Any], endpoint: str, message: Any) -> Any:
        """What `work` returns; a peer that keeps it waiting is named at every peer timeout. One that this service does
        not know as a member is given up then: it was one before this service came, or never."""
        loop, patience = asyncio.get_running_loop(), self.options.peer_timeout
        timer: asyncio.TimerHandle

        def silent() -> None:
            nonlocal timer
            timer = loop.call_later(patience, silent)
            self.counters["wait/silent_peer"] += patience
            kind = type(message).__name__
            self.log.warning("peer_is_silent", peer=self._name_of(endpoint), message_type=kind)
            if not any(member.endpoint == endpoint for member in self.members.values()):
                self._forget(endpoint)

        timer = loop.call_later(patience, silent)
        try:
            return await work
        finally:
            timer.cancel()

    async def _until_gone(self, endpoint: str) -> None:
        while any(member.endpoint == endpoint for member in self.members.values()):
            await self._members_changed.wait()

    def _name_of(self, endpoint: str) -> str:
        return next((member.name for member in self.members.values() if member.endpoint == endpoint), endpoint)

    @contextlib.contextmanager
    def working_on(self, *leases: Lease) -> Iterator[None]:
        """The draws are held here until the block ends: the next stage has them, or they have come to their end."""
        self._worked_on.add(leases)
        try:
            yield
        finally:
            self._worked_on.discard(leases)

    async def reached(self, milestone: Milestone, value: int, asked: str) -> None:
        """Returns once `milestone` is at `value`. Raises ServiceError, saying what this service was `asked`, when that
        takes longer than the stall timeout."""
        limit = self.options.stall_timeout
        try:
            await milestone.wait(value, limit)
        except TimeoutError:
            still = f"is still at {milestone.value} after --stall-timeout {limit:g} s"
            raise ServiceError(f"{self.name} {asked} and {still}") from None

    def report(self, message: Any) -> None:
        """Tell the controller."""
        self.send(self.context.controller, message)

    def of_role(self, role: str) -> list[Member]:
        """Live members of a role, by name."""
        if role not in self._of_role:
            self._of_role[role] = sorted((m for m in self.members.values() if m.role == role), key=lambda m: m.name)
        return self._of_role[role]

    async def member(self, role: str, key: int = 0) -> Member:
        """The member of a role that serves `key`; waits for the first one to join, at most the startup timeout.

        The log names the role at every peer timeout until then."""
        began, patience = time.monotonic(), self.options.startup_timeout
        while not (live := self.of_role(role)):
            waited = time.monotonic() - began
            if waited >= patience:
                raise ServiceError(f"{self.name} waited {patience:g} s for a {role} service; none joined")
            try:
                await asyncio.wait_for(self._members_changed.wait(), min(patience - waited, self.options.peer_timeout))
            except TimeoutError:
                self.log.warning("nobody_of_role", role=role, waited=round(time.monotonic() - began, 1))
        return live[key % len(live)]

    @contextlib.contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        """Count the seconds spent inside as `wait/<reason>`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.counters[f"wait/{reason}"] += time.monotonic() - start

    @property
    def exit_code(self) -> int:
        """What was decided; a service that was not told to end has failed."""
        return self._ended.result() if self._ended.done() else 1

    def end(self, code: int = 0) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    def fail(self, error: BaseException) -> None:
        """End the service with `error` as the reason. The first one wins."""
        if not self._ended.done():
            if isinstance(error, ServiceError | ProtocolError):
                self.log.error("service_failed", error=str(error))
            else:
                self.log.error("service_failed", error=f"{type(error).__name__}: {error}", exc_info=error)
            self._ended.set_result(error.code if isinstance(error, ServiceError) else 1)

    # --- inside ------------------------------------------------------------------------------------------------------

    def bind(self) -> str:
        """Where the mailbox binds: a free port where others come over TCP, a socket of this life otherwise."""
        if self.context.host is not None:
            return f"tcp://{self.context.host}:0"
        return self.run.endpoint(f"{self.name}-{self.incarnation}")

    def _watch(self, future: asyncio.Future[Any]) -> None:
        def done(finished: asyncio.Future[Any]) -> None:
            if not finished.cancelled() and (error := finished.exception()) is not None:
                self.fail(error)

        future.add_done_callback(done)

    def _signalled(self, number: int) -> None:
        """The first signal to a replica that is a member means: leave. The second, or one to anybody else: end."""
        name = signal.Signals(number).name
        if self.role not in REPLICATED or self.leaving or not self.members:
            self.log.info("signalled", signal=name)
            self.end(128 + number)
            return
        self.log.info("leaving", signal=name, groups=self.unfinished())
        self.leaving = True
        self.spawn(self._leave(number), "leave")

    async def _leave(self, number: int) -> None:
        try:
            await self.mailbox.tell(self.context.controller, Leaving(self.name), deadline=LEAVE_SECONDS)
        except ProtocolError as error:
            self.log.warning("left_without_goodbye", problem=str(error))
            self.end(128 + number)
            return
        await self.hand_back()

    def learn(self, members: tuple[Member, ...]) -> None:
        here = {m.endpoint for m in members}
        for endpoint in {m.endpoint for m in self.members.values()} - here:
            self._forget(endpoint)
        for endpoint in here.intersection(self._gone):  # a new life may be given the port of an old one
            self._gone.remove(endpoint)
        self.members = {m.name: m for m in members}
        self._of_role = {}
        changed, self._members_changed = self._members_changed, asyncio.Event()
        changed.set()

    def _forget(self, endpoint: str) -> None:
        if endpoint not in self._gone:
            self._gone.append(endpoint)
        self.mailbox.forget(endpoint)

    async def _on_inventory(self, message: Inventory, sender: Any) -> Holdings:
        return Holdings((*self.holds(), *itertools.chain(*self._worked_on)))

    async def _on_members(self, message: Members, sender: Any) -> None:
        self.learn(message.members)

    async def _on_shutdown(self, message: Shutdown, sender: Any) -> None:
        self.log.info("shutdown", reason=message.reason, failed=message.failed)
        self.end(IN_VAIN if message.failed else 0)


def shared_options(options: Options) -> dict[str, str]:
    """The options that every service of a run must agree on, as JSON values."""
    values = options.model_dump(mode="json", exclude=set(PER_SERVICE))
    return {name: json.dumps(value, sort_keys=True) for name, value in values.items()}
