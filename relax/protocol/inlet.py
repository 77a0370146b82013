"""The way in: what one sender has told and asked, each message taken once and in order.

An inlet is one life of one sender (name, incarnation) and the latest link it opened. Tells are accepted in sequence
into a bounded inbox and handled one after the other; asks are answered by tasks, at most once per ask, and the answer
is kept until the asker says that it has it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from relax.protocol.codec import pack_message, unpack_message
from relax.protocol.core import Core, log
from relax.protocol.envelope import (
    ACK,
    ASK,
    ERROR,
    NOTHING,
    PROBE,
    REFUSED,
    REPLY,
    SETTLED,
    TELL,
    URGENT,
    Envelope,
    Peer,
    head,
)
from relax.protocol.errors import CLOSING, Refused

Handler = Callable[[Any, Peer], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Route:
    """What a message class is handled by. Exceptions of the types in `tolerate` are logged, not fatal."""

    handler: Handler
    tolerate: tuple[type[Exception], ...] = ()


class Answer:
    """An ask that is being answered (`frames` is None), was answered, or was settled (`frames` is empty)."""

    __slots__ = ("frames", "kind", "touched")

    def __init__(self, kind: str, touched: float) -> None:
        self.kind, self.touched = kind, touched
        self.frames: list[Any] | None = None


class Inlet:
    """One sender, as the receiver remembers it. `send(route, frames)` writes to the mailbox's ROUTER."""

    def __init__(
        self,
        core: Core,
        peer: Peer,
        link: int,
        routes: dict[type, Route],
        send: Callable[[bytes, list[Any]], bool],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.core, self.peer, self.link, self.routes, self._send, self._fail = core, peer, link, routes, send, fail
        self.route = b""
        self.heard = core.loop.time()
        self.expected = 1
        self.inbox: deque[tuple[Route, Any, int]] = deque()
        self.inbox_bytes = 0
        self.answers: dict[int, Answer] = {}
        self._settled_below = 1
        self._gap_told = 0
        self._unacked = self._unacked_bytes = 0
        self._limit_told = core.bounds.window
        self._room_worth_telling = min(core.bounds.window, core.bounds.inbox) // 2
        self._broken = False
        self.tasks: set[asyncio.Task[None]] = set()
        self._ack_timer: asyncio.TimerHandle | None = None
        self._worker: asyncio.Task[None] | None = None

    # --- what the mailbox calls --------------------------------------------------------------------------------------

    def receive(self, envelope: Envelope, route: bytes, frames: list[Any]) -> None:
        """One message of this sender. Raises Refused; the sequence goes on behind a refused message."""
        self.route, self.heard = route, self.core.loop.time()
        act = envelope.act
        if act == TELL:
            self._told(envelope, frames)
        elif act == ASK:
            self._asked(envelope, frames)
        elif act == PROBE:
            self._probed(envelope)
        elif act == SETTLED:
            answer = self.answers.get(envelope.number)
            if answer is not None and answer.frames is not None:
                answer.frames = []
            self._forget_below(envelope.base)
            self.core.progress.set()
        else:
            raise Refused("header", f"act {act} does not come this way", field="act")

    def relink(self, link: int) -> None:
        """The sender opened a new link: a new sequence. What was accepted before is still handled, in order."""
        self.link, self.expected, self._settled_below, self._gap_told = link, 1, 1, 0
        self.answers.clear()

    @property
    def handling(self) -> bool:
        return bool(self.inbox) or self._worker is not None

    @property
    def owes_answers(self) -> bool:
        """Whether an answer was sent that the asker has not confirmed."""
        return any(a.frames for a in self.answers.values())

    def forget_answers(self, older_than: float) -> None:
        """Drop answers whose asker neither took them nor asked again since `older_than` (loop time)."""
        for number in [n for n, a in self.answers.items() if a.frames is not None and a.touched < older_than]:
            del self.answers[number]

    def acknowledge(self, *, probe: int | None = None, gap: bool = False, again: list[int] | None = None) -> None:
        """Tell the sender what came, how much more may come, and what must be repeated."""
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        self._unacked = self._unacked_bytes = 0
        bounds = self.core.bounds
        free = bounds.inbox - len(self.inbox) if self.inbox_bytes < bounds.inbox_bytes else 0
        self._limit_told = self.expected - 1 + max(0, free)
        self._reply(ACK, URGENT if gap else 0, self.expected, self._limit_told, probe, again or [])

    def close(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        for task in self.tasks:
            task.cancel()

    # --- tells -------------------------------------------------------------------------------------------------------

    def _told(self, envelope: Envelope, frames: list[Any]) -> None:
        counters, bounds, seq = self.core.counters, self.core.bounds, envelope.number
        # Below its base the sender has nothing left to send: we are a new life of this endpoint, or it gave up.
        self.expected = max(self.expected, envelope.base)
        if seq < self.expected:
            counters["duplicates"] += 1
            self._acknowledge_soon(0, False)
            return
        if seq > self.expected:
            counters["out_of_order"] += 1
            if self._gap_told != self.expected:
                self._gap_told = self.expected
                self.acknowledge(gap=True)
            return
        if self._broken or len(self.inbox) >= bounds.inbox or self.inbox_bytes >= bounds.inbox_bytes:
            counters["out_of_window"] += 1
            return
        self.expected += 1
        size = len(envelope.small) + sum(map(len, frames))
        try:
            route, message = self._open(envelope, frames)
        except Refused as refused:
            self._reply(REFUSED, 0, seq, TELL, refused.problem)
            self._acknowledge_soon(size, bool(envelope.flags & URGENT))
            raise
        counters["received"] += 1
        self.inbox.append((route, message, size))
        self.inbox_bytes += size
        if self._worker is None:
            self._worker = self._spawn(self._work(), f"handle tells of {self.peer.name}")
        self._acknowledge_soon(size, bool(envelope.flags & URGENT))

    def _open(self, envelope: Envelope, frames: list[Any]) -> tuple[Route, Any]:
        try:
            message = unpack_message(envelope.rest, envelope.small, frames)
            route = self.routes.get(type(message))
            if route is None:
                raise Refused("unhandled", f"{self.core.me.name} has no handler for this kind")
            return route, message
        except Refused as refused:
            refused.kind = str(envelope.rest[0])[:80] if envelope.rest else "?"
            raise

    async def _work(self) -> None:
        core = self.core
        try:
            while self.inbox:
                route, message, size = self.inbox[0]
                try:
                    await route.handler(message, self.peer)
                except route.tolerate as error:
                    core.counters["tolerated"] += 1
                    log.warning("handler_failed", message_type=type(message).__name__, error=repr(error))
                self.inbox.popleft()
                self.inbox_bytes -= size
                known_room = self._limit_told - self.expected
                if known_room < self._room_worth_telling <= core.bounds.inbox - len(self.inbox):
                    self.acknowledge()
        except Exception as error:
            self._broken = True
            self._fail(error)
        finally:
            self._worker = None
            core.progress.set()

    def _acknowledge_soon(self, size: int, now: bool) -> None:
        bounds = self.core.bounds
        self._unacked += 1
        self._unacked_bytes += size
        if now or self._unacked >= bounds.window // 4 or self._unacked_bytes >= bounds.window_bytes // 4:
            self.acknowledge()
        elif self._ack_timer is None:
            self._ack_timer = self.core.loop.call_later(bounds.ack_delay, self.acknowledge)

    # --- asks --------------------------------------------------------------------------------------------------------

    def _asked(self, envelope: Envelope, frames: list[Any]) -> None:
        counters, number = self.core.counters, envelope.number
        self._forget_below(envelope.base)
        known = self.answers.get(number)
        if number < self._settled_below or known is not None:
            counters["duplicates"] += 1
            if known is not None and known.frames:
                known.touched = self.heard
                self._send(self.route, known.frames)
            return
        if len(self.answers) >= 4 * self.core.bounds.asks:
            counters["out_of_window"] += 1
            return
        if self.core.answering >= self.core.bounds.handlers:
            counters["deferred"] += 1  # the asker's probe brings it back
            return
        try:
            route, message = self._open(envelope, frames)
        except Refused as refused:
            self._reply(REFUSED, 0, number, ASK, refused.problem)
            raise
        counters["received"] += 1
        self.core.answering += 1
        answer = self.answers[number] = Answer(type(message).__name__, self.heard)
        self._spawn(self._answer(number, answer, route, message), f"answer {answer.kind} of {self.peer.name}")

    async def _answer(self, number: int, answer: Answer, route: Route, message: Any) -> None:
        try:
            reply = await route.handler(message, self.peer)
            frames = self._packed(number, reply)
        except asyncio.CancelledError:
            frames = self.core.control(ERROR, 0, number, 0, self.link, f"{self.core.me.name} {CLOSING}")
        except Exception as error:
            log.warning("answer_failed", message_type=answer.kind, asker=str(self.peer), exc_info=error)
            self.core.counters["failed_answers"] += 1
            frames = self.core.control(ERROR, 0, number, 0, self.link, f"{type(error).__name__}: {error}")
        finally:
            self.core.answering -= 1
        answer.frames, answer.touched = frames, self.core.loop.time()
        if self.answers.get(number) is answer:
            self._send(self.route, frames)
        self.core.progress.set()

    def _packed(self, number: int, reply: Any) -> list[Any]:
        if reply is None:
            return self.core.control(NOTHING, 0, number, 0, self.link)
        address = self.core.address(self.link)
        packed = pack_message(self.core.packer, address, reply, self.core.bounds.limits)
        return packed.frames(head(REPLY, 0, number, 0, packed.header))

    def _forget_below(self, floor: int) -> None:
        if floor > self._settled_below:
            self._settled_below = floor
            for number in [n for n, a in self.answers.items() if n < floor and a.frames is not None]:
                del self.answers[number]

    # --- both --------------------------------------------------------------------------------------------------------

    def _probed(self, envelope: Envelope) -> None:
        if len(envelope.rest) != 2 or type(envelope.rest[0]) is not int or type(envelope.rest[1]) is not list:
            raise Refused("header", "no [lowest ask, asks] behind the address", field="probe")
        floor, asked = envelope.rest
        self.expected = max(self.expected, envelope.base)
        self._forget_below(floor)
        again = []
        for number in asked[: self.core.bounds.asks]:
            answer = self.answers.get(number) if type(number) is int else None
            if answer is not None:
                answer.touched = self.heard
            if answer is None or answer.frames is not None:
                again.append(number)
        self.acknowledge(probe=envelope.number, again=again)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self.core.loop.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def _reply(self, act: int, flags: int, number: int, base: int, *rest: Any) -> None:
        self._send(self.route, self.core.control(act, flags, number, base, self.link, *rest))
