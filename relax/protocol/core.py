"""What the two halves of a mailbox, links (out) and inlets (in), share."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgpack
import structlog
import zmq

from relax.protocol.envelope import Peer, head
from relax.protocol.errors import Refused
from relax.protocol.faults import Faults
from relax.protocol.frames import Limits
from relax.protocol.security import Security
from relax.protocol.tally import telling

log = structlog.get_logger("relax.protocol")

# Reconnecting soon matters at start, when services bind in any order; the cap matters for a peer that stays away.
RECONNECT_MS, RECONNECT_MAX_MS = 20, 500
# A peer's host that vanished without closing its connections is noticed by zmq itself, so that it connects anew.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 5_000, 20_000


@dataclass(frozen=True, slots=True)
class Bounds:
    """Every queue and clock of a mailbox. Counts are messages per peer, times are seconds.

    window, window_bytes: told and not yet acknowledged; inbox, inbox_bytes: accepted and not yet handled; asks: asked
    and not yet answered; handlers: asks of all peers being answered at once; peers: senders remembered; strangers:
    those among them of no run; offences: refusals after which nothing more is read from a connection.
    ack_delay: an acknowledgement waits at most this long for company; probe, probe_max: first and longest interval
    after which a silent peer is probed; keep_replies: how long an answer is kept for an asker that went quiet.
    peer_timeout: the deadline of a tell that names none.
    """

    window: int = 256
    window_bytes: int = 256 * 2**20
    inbox: int = 1024
    inbox_bytes: int = 512 * 2**20
    asks: int = 256
    handlers: int = 256
    peers: int = 4096
    strangers: int = 64
    offences: int = 32
    ack_delay: float = 0.005
    probe: float = 0.2
    probe_max: float = 2.0
    keep_replies: float = 30.0
    peer_timeout: float = 60.0
    limits: Limits = field(default_factory=Limits)


@dataclass(slots=True)
class Core:
    """Who this mailbox is, what it runs on, and what it counts."""

    me: Peer
    run_id: str
    lineage: int
    bounds: Bounds
    security: Security
    faults: Faults | None
    context: zmq.Context
    loop: asyncio.AbstractEventLoop
    packer: msgpack.Packer = field(default_factory=msgpack.Packer)
    counters: Counter[str] = field(default_factory=Counter)
    answering: int = 0
    # Set whenever something was acknowledged, handled or settled; `close` waits on it.
    progress: asyncio.Event = field(default_factory=asyncio.Event)

    def address(self, link: int) -> list[Any]:
        return [self.run_id, self.lineage, self.me.name, self.me.incarnation, link, self.me.endpoint]

    def control(self, act: int, flags: int, number: int, base: int, link: int, *rest: Any) -> list[Any]:
        """The frames of an act that carries no message."""
        header = self.packer.pack([*self.address(link), *rest])
        return [head(act, flags, number, base, header) + header]

    def socket(self, kind: int, endpoint: str) -> zmq.Socket:
        """A socket that is about to bind to `endpoint` (ROUTER) or connect to it (DEALER)."""
        bounds, socket = self.bounds, self.context.socket(kind)
        socket.linger = 0
        # Windows bound what is on its way; the marks only keep a peer that ignores its window from filling memory.
        socket.sndhwm = socket.rcvhwm = 2 * bounds.window + bounds.asks
        # Somewhat more than is accepted, so that a sender that is a little above learns why; beyond, zmq hangs up.
        socket.maxmsgsize = 5 * max(bounds.limits.frame_bytes, bounds.limits.header_bytes) // 4
        if kind == zmq.ROUTER:
            socket.router_mandatory = 1
        else:
            # Without a connection nothing is queued: a message to an absent peer stays in its window, once.
            socket.immediate = 1
            socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS, RECONNECT_MAX_MS
        self.security.apply(socket, endpoint, server=kind == zmq.ROUTER)
        return socket

    def refused(self, refused: Refused) -> None:
        """Count a refusal, and log it ever more rarely."""
        self.counters["refused"] += 1
        self.counters[f"refused_{refused.reason}"] += 1
        seen = self.counters[f"refused_{refused.reason}"]
        if telling(seen):
            log.warning("message_refused", reason=refused.reason, error=str(refused), count=seen)
