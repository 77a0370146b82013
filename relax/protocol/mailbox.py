"""The mailbox: how a service tells, asks, and is told and asked.

One ROUTER is bound at the mailbox's endpoint and receives from everybody (`inlet.py`); one DEALER per peer sends
(`link.py`). `tell` is delivered in order per sender and handled once per life of the receiver; `ask` has a reply. Both
are repeated until they are acknowledged or answered, across a peer that binds late or restarts at the same endpoint: a
restarted peer may see again what its predecessor took and did not acknowledge, so whatever matters carries a lease and
is accepted by compare-and-set. Asks and tells are not ordered among each other.

A mailbox belongs to the event loop that started it.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from types import TracebackType
from typing import Any, Self

import zmq

from relax.protocol.codec import schema_of
from relax.protocol.core import Bounds, Core, log
from relax.protocol.endpoint import Binding
from relax.protocol.envelope import PROBE, REFUSED, STRANGER, URGENT, Envelope, Peer, head, parse
from relax.protocol.errors import MailboxClosed, Refused
from relax.protocol.faults import Faults
from relax.protocol.inlet import Handler, Inlet, Route
from relax.protocol.link import Link
from relax.protocol.pump import Pump
from relax.protocol.security import Security
from relax.protocol.tally import Tally

SWEEP_SECONDS = 5.0
# How long zmq may go on writing after close; the acknowledgements in the closing exchange are the last to leave.
LINGER_MS = 500
SETTLE_SECONDS = 1.0
# Refusals that an honest sender can run into: an older link's late message, a mailbox that is full.
BLAMELESS = frozenset({"stale", "peers"})

SenderKey = tuple[str, str, str]  # run id, name, incarnation


class Mailbox:
    """The one point of contact of a service.

    `bind`: `ipc:///path/x.sock`, `tcp://host:0` (any free port) or `inproc://name`. After `await start()`, `endpoint`
    is what peers connect to. `failed` is a future that gets the exception of a tell's handler: such a failure is fatal
    to the service unless `on` declared it tolerable.

    `counters` only grow: received, duplicates, repeated, out_of_order, out_of_window, unroutable, stale, deferred,
    probes, refused and refused_<reason>, refused_by_peer, refused_connections, failed_connections, tolerated,
    failed_answers, cut_off (messages unread) of cut_off_senders.
    """

    def __init__(
        self,
        name: str,
        *,
        run_id: str,
        lineage: int,
        incarnation: str,
        bind: str,
        bounds: Bounds | None = None,
        security: Security | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.name, self.run_id, self.lineage, self.incarnation = name, run_id, lineage, incarnation
        self.bind, self.bounds = bind, bounds or Bounds()
        self.security, self.faults = security or Security(), faults
        self.counters: Counter[str] = Counter()
        self.failed: asyncio.Future[None]
        self._endpoint = ""
        self._routes: dict[type, Route] = {}
        self._open_routes: dict[type, Route] = {}
        self._links: dict[str, Link] = {}
        self._link_numbers = 0
        self._inlets: dict[SenderKey, Inlet] = {}
        self._strangers: dict[SenderKey, Inlet] = {}
        self._offences = Tally()
        self._core: Core | None = None
        self._pump: Pump | None = None
        self._binding: Binding | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    async def start(self) -> None:
        """Bind, and receive from the next turn of the loop on. Raises BindFailed; there is no other endpoint to try."""
        if self._core is not None or self._closed:
            raise MailboxClosed(f"mailbox {self.name} was started before")
        loop = asyncio.get_running_loop()
        # One zmq context per process; it outlives every mailbox, as its sockets are closed by their owners.
        context: zmq.Context = zmq.Context.instance()
        me = Peer(self.name, "", self.incarnation)
        core = Core(me, self.run_id, self.lineage, self.bounds, self.security, self.faults, context, loop)
        core.counters = self.counters
        socket = core.socket(zmq.ROUTER, self.bind)
        try:
            self._binding = Binding(socket, self.bind, self.security, self.counters)
        except BaseException:
            socket.close(linger=0)
            raise
        core.me = Peer(self.name, self._binding.endpoint, self.incarnation)
        self._core, self._endpoint = core, self._binding.endpoint
        self.failed = loop.create_future()
        frames = self.bounds.limits.frames + 3
        self._pump = Pump(socket, routed=True, max_frames=frames, on_message=self._received, on_writable=lambda: None)
        self._sweeper = loop.call_later(SWEEP_SECONDS, self._sweep)

    @property
    def endpoint(self) -> str:
        """Where peers reach this mailbox. Raises MailboxClosed before `start`."""
        if not self._endpoint:
            raise MailboxClosed(f"mailbox {self.name} has no endpoint before start()")
        return self._endpoint

    def on(
        self,
        message: type,
        handler: Handler,
        *,
        tolerate: tuple[type[Exception], ...] = (),
        strangers: bool = False,
    ) -> None:
        """Handle a message class with `await handler(message, sender)`.

        For a tell the result is ignored; an exception sets `failed`, unless it is one of `tolerate` (counted, logged).
        For an ask the result, a message or None, is the reply; an exception is raised at the asker as PeerError.
        A message without a handler is refused and its sender told so: register before peers can know the endpoint.
        `strangers` may send it too: mailboxes that do not know their run yet (run id "").
        """
        schema_of(message)
        if message in self._routes:
            raise ValueError(f"mailbox {self.name} handles {message.__name__} already")
        self._routes[message] = Route(handler, tolerate)
        if strangers:
            self._open_routes[message] = self._routes[message]

    async def tell(self, to: str | Peer, message: Any, deadline: float | None = None) -> None:
        """Deliver a message and return when the peer acknowledged that it accepted it.

        Messages to one peer are delivered in the order of the calls; the next need not wait for this one. `deadline` is
        in seconds from now (default: `bounds.peer_timeout`; inf: until it is acknowledged or the peer forgotten) and
        covers both a full window and a silent peer: then PeerSilent is raised. A message that was in the window by then
        may still arrive later.
        Raises EncodeError, PeerRefused, PeerForgotten (after `forget`), MailboxClosed.
        """
        link = self._link(to)
        parcel = link.pack(message)
        link.tell(parcel)
        try:
            async with asyncio.timeout(_seconds(self.bounds.peer_timeout if deadline is None else deadline)):
                await parcel.done
        except TimeoutError:
            raise link.silent(parcel) from None
        finally:
            link.withdraw(parcel)

    def tell_nowait(self, to: str | Peer, message: Any) -> None:
        """Put a message into the peer's window and return; it is delivered like any other. Raises PeerSilent when the
        window is full, EncodeError, MailboxClosed. Refusals are only logged and counted."""
        link = self._link(to)
        parcel = link.pack(message)
        if not link.room():
            raise link.silent(parcel, "make room for")
        link.tell(parcel)

    async def ask(self, to: str | Peer, message: Any, deadline: float) -> Any:
        """The peer's reply to a message (None if its handler returned None), at the latest `deadline` seconds from now.

        Raises PeerSilent at the deadline, PeerError when the peer's handler raised, Refused when the reply broke the
        contract, EncodeError, PeerRefused, PeerForgotten, MailboxClosed.
        """
        link = self._link(to)
        parcel = link.pack(message)
        try:
            async with asyncio.timeout(_seconds(deadline)), link.ask_room:
                number = link.ask(parcel)
                try:
                    return await parcel.done
                finally:
                    link.settle(number)
        except TimeoutError:
            raise link.silent(parcel, "answer") from None

    def silence(self, to: str | Peer) -> float | None:
        """Seconds since a peer that owes an acknowledgement or an answer was last heard; None if it owes nothing."""
        link = self._links.get(_endpoint(to))
        return None if link is None else link.silence()

    def forget(self, to: str | Peer) -> None:
        """Drop a peer that is gone: what still waits for it raises PeerForgotten, what it sent and was accepted is
        handled. Telling the same endpoint again later starts anew."""
        endpoint = _endpoint(to)
        link = self._links.pop(endpoint, None)
        if link is not None:
            link.close()
        for key in [k for k, inlet in self._inlets.items() if inlet.peer.endpoint == endpoint and not inlet.tasks]:
            self._inlets.pop(key).close()
        if self._core is not None:
            self._core.progress.set()

    async def close(self, deadline: float = 10.0) -> None:
        """Deliver everything, then stop: every tell acknowledged, every accepted tell handled, every answer taken.

        Receives until then, so that two mailboxes can close at once. Stopped at the deadline all the same; then raises
        PeerSilent naming the first peer that did not acknowledge. Closing a closed mailbox does nothing.
        """
        if self._closed or self._core is None:
            self._closed = True
            return
        core, end = self._core, self._core.loop.time() + deadline
        settled = min(end, core.loop.time() + SETTLE_SECONDS)
        while self._pending(core.loop.time() < settled) and (left := end - core.loop.time()) > 0:
            core.progress.clear()
            try:
                async with asyncio.timeout(min(left, SETTLE_SECONDS)):
                    await core.progress.wait()
            except TimeoutError:
                continue
        silent = next((link for link in self._links.values() if link.unacked or link.waiting), None)
        error = None if silent is None else silent.silent(next(iter([*silent.unacked.values(), *silent.waiting])))
        tasks = [task for inlet in self._senders() for task in inlet.tasks]
        for inlet in self._senders():
            inlet.acknowledge()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # One turn of zmq's own thread, so that the last acknowledgements leave before the socket closes.
        await asyncio.sleep(0.01)
        self._stop(LINGER_MS)
        if error is not None:
            raise error

    def abort(self) -> None:
        """Stop at once: nothing more is sent, received or handled. May be called at any time, also twice."""
        if not self._closed and self._core is not None:
            self._stop(0)
        self._closed = True

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
        else:
            self.abort()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _stop(self, linger_ms: int) -> None:
        assert self._pump is not None and self._binding is not None
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for inlet in self._senders():
            inlet.close()
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._inlets.clear()
        self._strangers.clear()
        self._binding.release()
        self._pump.close(linger_ms)
        if not self.failed.done():
            self.failed.cancel()

    def _pending(self, with_answers: bool) -> bool:
        if any(link.unacked or link.waiting for link in self._links.values()):
            return True
        return any(i.handling or (with_answers and i.owes_answers) for i in self._senders())

    def _senders(self) -> Iterator[Inlet]:
        return chain(self._inlets.values(), self._strangers.values())

    def _link(self, to: str | Peer) -> Link:
        if self._closed or self._core is None:
            raise MailboxClosed(f"mailbox {self.name} is {'closed' if self._closed else 'not started'}")
        endpoint = _endpoint(to)
        link = self._links.get(endpoint)
        if link is None:
            self._link_numbers += 1
            link = self._links[endpoint] = Link(self._core, endpoint, self._link_numbers)
        return link

    def _fail(self, error: BaseException) -> None:
        log.error("mailbox_failed", mailbox=self.name, exc_info=error)
        if not self.failed.done():
            self.failed.set_exception(error)

    def _send(self, route: bytes, frames: list[Any]) -> bool:
        if self.faults is None:
            return self._transmit([route, *frames])
        return self.faults.send([route, *frames], self._transmit)

    def _transmit(self, frames: list[Any]) -> bool:
        if self._closed or self._pump is None:
            return False
        try:
            if self._pump.send(frames):
                return True
            self.counters["blocked"] += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # The connection that asked is gone; the peer's probe over its next one brings this back.
            self.counters["unroutable"] += 1
        return False

    def _received(self, frames: list[Any]) -> None:
        assert self._core is not None and self._pump is not None
        if self._offences and self._offences[frames[0]] >= self.bounds.offences:
            self.counters["cut_off"] += 1
            return
        try:
            self._dispatch(self._core, frames)
        except Refused as refused:
            self._core.refused(refused)
            if refused.reason not in BLAMELESS and self._offences.add(frames[0]) == self.bounds.offences:
                self.counters["cut_off_senders"] += 1
                log.error("sender_cut_off", sender=refused.sender, origin=self._pump.origin(), last=str(refused))
        except Exception as error:
            # Raised inside a callback of the loop, it would only be printed there.
            self._fail(error)

    def _dispatch(self, core: Core, frames: list[Any]) -> None:
        route, sender = frames[0], f"routing id {frames[0].hex()}"
        try:
            if len(frames) < 2:
                raise Refused("header", "no first frame", field="head")
            envelope = parse(frames[1:], self.bounds.limits)
            peer = Peer(envelope.name, envelope.endpoint, envelope.incarnation)
            sender = str(peer)
            self._check_run(core, envelope, route)
            self._inlet(core, envelope, peer).receive(envelope, route, frames[2:])
        except Refused as refused:
            refused.sender = sender
            raise

    def _check_run(self, core: Core, envelope: Envelope, route: bytes) -> None:
        if envelope.run_id == STRANGER and self._open_routes:
            return
        if envelope.run_id != self.run_id:
            refused = Refused("run", f"run id {envelope.run_id!r} is not the run of this mailbox", field="run_id")
        elif envelope.lineage != self.lineage:
            problem = f"lineage {envelope.lineage} is not the present lineage {self.lineage}"
            refused = Refused("lineage", problem, field="lineage")
        else:
            return
        if envelope.act <= PROBE:
            # In the sender's own words: it learns nothing of this run.
            address = [envelope.run_id, envelope.lineage, self.name, self.incarnation, envelope.link, self.endpoint]
            header = core.packer.pack([*address, refused.problem])
            self._send(route, [head(REFUSED, URGENT, envelope.number, envelope.act, header) + header])
        raise refused

    def _inlet(self, core: Core, envelope: Envelope, peer: Peer) -> Inlet:
        key = (envelope.run_id, envelope.name, envelope.incarnation)
        # Strangers are kept apart: however many come, they push no member out.
        member = envelope.run_id == self.run_id
        inlets = self._inlets if member else self._strangers
        inlet = inlets.get(key)
        if inlet is None:
            bound = self.bounds.peers if member else self.bounds.strangers
            if len(inlets) >= bound:
                _make_room(inlets, bound)
            routes = self._routes if member else self._open_routes
            inlet = inlets[key] = Inlet(core, peer, envelope.link, routes, self._send, self._fail)
        elif envelope.link > inlet.link:
            inlet.relink(envelope.link)
        elif envelope.link < inlet.link:
            raise Refused("stale", "from a link that this sender has given up", field="link")
        return inlet

    def _sweep(self) -> None:
        assert self._core is not None
        loop = self._core.loop
        for inlet in self._senders():
            inlet.forget_answers(loop.time() - self.bounds.keep_replies)
        self._sweeper = loop.call_later(SWEEP_SECONDS, self._sweep)


def _make_room(inlets: dict[SenderKey, Inlet], bound: int) -> None:
    idle = sorted((inlet.heard, key) for key, inlet in inlets.items() if not inlet.tasks)
    if not idle:
        raise Refused("peers", f"{bound} senders are at work already")
    # Some at a time: looking through all of them for each new sender would let inventing names cost us more.
    for _, key in idle[: 1 + bound // 8]:
        inlets.pop(key).close()


def _seconds(deadline: float) -> float | None:
    return None if deadline == math.inf else deadline


def _endpoint(to: str | Peer) -> str:
    return to.endpoint if isinstance(to, Peer) else to
