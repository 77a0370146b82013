"""The way out: one DEALER socket per peer, so that no peer can hold up the messages to another.

Tells are numbered and kept until the peer's cumulative acknowledgement covers them. What is lost is found by asking,
not by guessing from a clock: a link whose oldest tell or ask stays open sends a probe, and since a connection keeps its
order, everything sent before the probe has arrived before it or never will. So a busy peer is never sent a message
twice, however large, and one that was absent or restarted is caught up from the first message that it did not
acknowledge.
"""

import asyncio
from collections import deque
from typing import Any

import zmq

from relax.protocol.codec import pack_message, schema_of, unpack_message
from relax.protocol.core import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS, Core, log
from relax.protocol.envelope import (
    ACK,
    ASK,
    ERROR,
    NAMES,
    NOTHING,
    PROBE,
    REFUSED,
    REPLY,
    SETTLED,
    STRANGER,
    TELL,
    URGENT,
    Envelope,
    Peer,
    head,
    parse,
)
from relax.protocol.errors import PeerError, PeerForgotten, PeerRefused, PeerSilent, Refused
from relax.protocol.frames import Packed
from relax.protocol.handshakes import Handshakes
from relax.protocol.pump import Pump

Done = asyncio.Future[Any]


class Parcel:
    """A message on its way: packed, and not yet acknowledged (tell) or answered (ask)."""

    __slots__ = ("done", "kind", "packed", "since", "size")

    def __init__(self, kind: str, packed: Packed, loop: asyncio.AbstractEventLoop) -> None:
        self.kind, self.packed, self.size = kind, packed, packed.size
        self.done: Done = loop.create_future()
        self.since = loop.time()

    def frames(self, act: int, flags: int, number: int, base: int) -> list[Any]:
        return self.packed.frames(head(act, flags, number, base, self.packed.header))

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            # Whoever still waits gets it; a message that nobody waits for was reported by the log already.
            self.done.exception()


class Link:
    """Everything on its way to one endpoint."""

    def __init__(self, core: Core, endpoint: str, number: int) -> None:
        self.core, self.endpoint, self.number = core, endpoint, number
        self.peer: Peer | str = endpoint
        self.heard: float | None = None
        self.closed = False
        # Tells: numbers up to `acked` are acknowledged, up to `sent` handed to zmq, up to `limit` acceptable there.
        self.unacked: dict[int, Parcel] = {}
        self.bytes = self.acked = self.sent = self._last = 0
        self.limit = core.bounds.window
        self.waiting: deque[Parcel] = deque()
        self.asks: dict[int, Parcel] = {}
        self._unsent_asks: dict[int, None] = {}
        self._next_ask = 1
        self.ask_room = asyncio.Semaphore(core.bounds.asks)
        self._timer: asyncio.TimerHandle | None = None
        self._interval = core.bounds.probe
        self._watched = (0, 0)
        self._probe_due = False
        self._handshakes: Handshakes | None = None
        self._no_connection = ""  # why the last one failed; empty once something was heard
        self._pump = self._connect()

    # --- what the mailbox calls --------------------------------------------------------------------------------------

    def pack(self, message: Any) -> Parcel:
        """Raises EncodeError when the message cannot travel."""
        address = self.core.address(self.number)
        packed = pack_message(self.core.packer, address, message, self.core.bounds.limits)
        return Parcel(schema_of(type(message)).kind, packed, self.core.loop)

    def tell(self, parcel: Parcel) -> None:
        """Send the parcel after all earlier ones, as soon as the window has room."""
        self.waiting.append(parcel)
        self._admit()
        self._flush()

    def room(self) -> bool:
        return not self.waiting and len(self.unacked) < self.core.bounds.window

    def withdraw(self, parcel: Parcel) -> None:
        """Its caller stopped waiting: a parcel that never got into the window is not sent any more."""
        if self.waiting and parcel in self.waiting:
            self.waiting.remove(parcel)
            self._admit()

    def silence(self) -> float | None:
        """Seconds since the peer was heard, or since the oldest message that it owes something for."""
        owed = [p.since for p in (*self.unacked.values(), *self.asks.values())]
        if not owed:
            return None
        return self.core.loop.time() - max(min(owed), self.heard or 0.0)

    def ask(self, parcel: Parcel) -> int:
        """Send an ask; its number is for `settle`."""
        number, self._next_ask = self._next_ask, self._next_ask + 1
        self.asks[number] = parcel
        self._unsent_asks[number] = None
        self._flush()
        return number

    def settle(self, number: int) -> None:
        """The ask was answered or given up: the peer may forget it."""
        self._unsent_asks.pop(number, None)
        if self.asks.pop(number, None) is not None and not self.closed:
            self._send(self.core.control(SETTLED, 0, number, self._floor(), self.number))

    def silent(self, parcel: Parcel, problem: str = "") -> PeerSilent:
        now = self.core.loop.time()
        heard = None if self.heard is None else now - self.heard
        return PeerSilent(str(self.peer), parcel.kind, now - parcel.since, heard, problem, self._no_connection)

    def close(self, error: Exception | None = None) -> None:
        """Give up everything that is still on its way."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        for parcel in [*self.unacked.values(), *self.waiting, *self.asks.values()]:
            parcel.fail(error or PeerForgotten(str(self.peer), parcel.kind))
        self.unacked.clear()
        self.waiting.clear()
        self.asks.clear()
        self._disconnect()

    # --- sending -----------------------------------------------------------------------------------------------------

    def _connect(self) -> Pump:
        socket = self.core.socket(zmq.DEALER, self.endpoint)
        if self.endpoint.startswith("tcp://"):
            socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
            self._handshakes = Handshakes(socket, self._connection_failed)
        try:
            socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            if self._handshakes is not None:
                self._handshakes.close()
            socket.close(linger=0)
            raise ValueError(f"{self.endpoint!r} is no endpoint to connect to: {error.strerror}") from error
        frames = self.core.bounds.limits.frames + 2
        return Pump(socket, routed=False, max_frames=frames, on_message=self._received, on_writable=self._flush)

    def _disconnect(self) -> None:
        if self._handshakes is not None:
            self._handshakes.close()
        self._pump.close(linger_ms=0)

    def _connection_failed(self, reason: str) -> None:
        self.core.counters["failed_connections"] += 1
        if not self._no_connection:
            log.warning("connection_failed", peer=str(self.peer), reason=reason)
        self._no_connection = reason

    def _send(self, frames: list[Any]) -> bool:
        faults = self.core.faults
        return self._pump.send(frames) if faults is None else faults.send(frames, self._send_late)

    def _send_late(self, frames: list[Any]) -> bool:
        return not self.closed and self._pump.send(frames)

    def _admit(self) -> None:
        bounds = self.core.bounds
        while self.waiting and len(self.unacked) < bounds.window:
            size = self.waiting[0].size
            if self.unacked and self.bytes + size > bounds.window_bytes:
                return
            parcel = self.waiting.popleft()
            self._last += 1
            self.unacked[self._last] = parcel
            self.bytes += size

    def _flush(self) -> None:
        """Hand to zmq whatever it takes; called again when it takes more."""
        if self._timer is None and (self.unacked or self.asks) and not self.closed:
            self._arm()
        if self._probe_due and not self._probe():
            return
        base = self.acked + 1
        while self.sent < min(self._last, self.limit):
            parcel = self.unacked[self.sent + 1]
            # Alone on its way, a message gets its acknowledgement at once; in a crowd they share one.
            flags = URGENT if len(self.unacked) == 1 else 0
            if not self._send(parcel.frames(TELL, flags, self.sent + 1, base)):
                return
            self.sent += 1
        while self._unsent_asks:
            number = next(iter(self._unsent_asks))
            parcel = self.asks[number]
            if not self._send(parcel.frames(ASK, 0, number, self._floor())):
                return
            del self._unsent_asks[number]

    def _floor(self) -> int:
        return min(self.asks, default=self._next_ask)

    # --- finding out what was lost -----------------------------------------------------------------------------------

    def _oldest(self) -> tuple[int, int]:
        """The tell and the ask that have been open longest; 0 where there is none."""
        return self.acked + 1 if self.unacked else 0, min(self.asks, default=0)

    def _arm(self) -> None:
        self._watched = self._oldest()
        self._timer = self.core.loop.call_later(self._interval, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self.unacked and not self.asks:
            self._interval = self.core.bounds.probe
            return
        # Each is looked at by itself: that others are acknowledged and answered says nothing of one that was lost.
        if not any(now and now == then for now, then in zip(self._oldest(), self._watched, strict=True)):
            self._interval = self.core.bounds.probe
        else:
            self._interval = min(2 * self._interval, self.core.bounds.probe_max)
            if not self._probe() and (self._no_connection or self.endpoint.startswith("inproc://")):
                # inproc never reconnects by itself, nor does zmq after a handshake that broke the protocol.
                self._disconnect()
                self._pump = self._connect()
        self._arm()

    def _probe(self) -> bool:
        sent_asks = [n for n in self.asks if n not in self._unsent_asks]
        self.core.counters["probes"] += 1
        probe = self.core.control(PROBE, 0, self.sent, self.acked + 1, self.number, self._floor(), sent_asks)
        self._probe_due = not self._send(probe)
        return not self._probe_due

    # --- what comes back ---------------------------------------------------------------------------------------------

    def _received(self, frames: list[Any]) -> None:
        core = self.core
        try:
            envelope = parse(frames, core.bounds.limits)
            if envelope.link != self.number:
                core.counters["stale"] += 1
                return
            if envelope.act == REFUSED:
                self._refused(envelope)
                return
            if core.run_id != STRANGER and (envelope.run_id, envelope.lineage) != (core.run_id, core.lineage):
                raise Refused("run", "an answer from another run or lineage", field="run_id")
            self.heard, self._no_connection = core.loop.time(), ""
            if isinstance(self.peer, str) or self.peer.incarnation != envelope.incarnation:
                self.peer = Peer(envelope.name, self.endpoint, envelope.incarnation)
            if envelope.act == ACK:
                self._acknowledged(envelope)
            elif envelope.act in (REPLY, NOTHING, ERROR):
                self._answered(envelope, frames[1:])
            else:
                raise Refused("header", f"{NAMES[envelope.act]} does not come this way", field="act")
        except Refused as refused:
            refused.sender = str(self.peer)
            core.refused(refused)

    def _acknowledged(self, envelope: Envelope) -> None:
        upto, counters = envelope.number - 1, self.core.counters
        if upto > self.sent:
            raise Refused("window", f"{upto} acknowledged, only {self.sent} were sent", field="number")
        if len(envelope.rest) != 2 or type(envelope.rest[1]) is not list:
            raise Refused("header", "no [probe, asks] behind the address", field="ack")
        probe, again = envelope.rest
        while self.acked < upto:
            self.acked += 1
            parcel = self.unacked.pop(self.acked)
            self.bytes -= parcel.size
            if not parcel.done.done():
                parcel.done.set_result(None)
        self.limit = envelope.base
        # A gap, or a probe that overtook what was sent before it: all behind `upto` is lost, or was not acceptable.
        if upto < self.sent and (envelope.flags & URGENT or (type(probe) is int and upto < probe)):
            counters["repeated"] += self.sent - max(upto, self.acked)
            self.sent = max(upto, self.acked)
        for number in again:
            if type(number) is int and number in self.asks:
                counters["repeated"] += 1
                self._unsent_asks[number] = None
        self._admit()
        self._flush()
        self.core.progress.set()

    def _answered(self, envelope: Envelope, frames: list[Any]) -> None:
        parcel = self.asks.get(envelope.number)
        if parcel is None or parcel.done.done():
            self.core.counters["duplicates"] += 1
            return
        try:
            if envelope.act == NOTHING:
                parcel.done.set_result(None)
            elif envelope.act == ERROR:
                parcel.fail(PeerError(str(self.peer), parcel.kind, _text(envelope)))
            else:
                parcel.done.set_result(unpack_message(envelope.rest, envelope.small, frames))
        except Refused as refused:
            refused.sender = str(self.peer)
            parcel.fail(refused)
            raise

    def _refused(self, envelope: Envelope) -> None:
        problem = _text(envelope)
        log.error("peer_refused", peer=str(self.peer), problem=problem)
        self.core.counters["refused_by_peer"] += 1
        if envelope.flags & URGENT:
            for parcel in [*self.unacked.values(), *self.waiting, *self.asks.values()]:
                parcel.fail(PeerRefused(str(self.peer), parcel.kind, problem))
            self.unacked.clear()
            self.waiting.clear()
            self.asks.clear()
            self._unsent_asks.clear()
            self.acked = self.sent = self._last
            self.bytes = 0
            self.core.progress.set()
            return
        # A refused tell stays in its window: the acknowledgement behind this covers it.
        number = envelope.number
        if envelope.base == TELL:
            refused = self.unacked.get(number)
        else:
            refused = self.asks.pop(number, None)
            self._unsent_asks.pop(number, None)
        if refused is not None:
            refused.fail(PeerRefused(str(self.peer), refused.kind, problem))


def _text(envelope: Envelope) -> str:
    """What a peer says of its refusal or error; a traceback's worth at most."""
    return " ".join(part for part in envelope.rest if type(part) is str)[:10_000]
