"""Connections that ended before they began: whom a socket refused, or by whom it was refused, and why.

libzmq tells of them through a monitor, without the address of a refused peer. But since we closed the connection, the
kernel remembers it for a minute. (A peer that closes first leaves nothing behind, so members that went are not taken
for refused ones.)
"""

import asyncio
import itertools
import os
import struct
from collections import Counter
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import structlog
import zmq

from relax.protocol.pump import Pump
from relax.protocol.tally import Tally, telling

log = structlog.get_logger("relax.protocol")

_EVENT = struct.Struct("=Hi")
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
NOT_ADMITTED = "the key is not admitted"
CLOSED = "the connection was closed"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_CLOSED_BY_US = ("04", "05", "06", "0B")  # FIN_WAIT1, FIN_WAIT2, TIME_WAIT, CLOSING
# From the event to the end of the connection; also how often at most the kernel is asked.
_NAMING_SECONDS = 0.2
_NUMBERS = itertools.count()


class Handshakes:
    """Calls `on_failed(reason)` for each handshake of `socket` that fails. Set up before the socket binds or
    connects, closed before it closes."""

    def __init__(self, socket: zmq.Socket, on_failed: Callable[[str], None]) -> None:
        self._socket, self._on_failed = socket, on_failed
        # pyzmq would name it after the socket's descriptor, which the system gives out again.
        monitor = socket.get_monitor_socket(_FAILED, f"inproc://relax-handshakes-{next(_NUMBERS)}")
        monitor.linger = 0
        self._pump = Pump(monitor, routed=False, max_frames=2, on_message=self._told, on_writable=lambda: None)

    def close(self) -> None:
        if not self._pump.closed:
            self._socket.disable_monitor()
            self._pump.close(linger_ms=0)

    def _told(self, frames: list[Any]) -> None:
        event, value = _EVENT.unpack(bytes(frames[0]))
        if event & _FAILED:
            self._on_failed(_reason(event, value))


def _reason(event: int, value: int) -> str:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return NOT_ADMITTED
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return f"{CLOSED} ({os.strerror(value)})"
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "one side speaks plain text, the other has keys"
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "the two sides have different keys"
    return f"broken protocol (0x{value & 0xFFFFFFFF:08x})"


class Refusals:
    """Counts the connections that a bound socket refuses (`refused_connections`), and logs from where they came."""

    def __init__(self, socket: zmq.Socket, counters: Counter[str]) -> None:
        self._counters = counters
        self._told = Tally()
        self._untold: dict[str, None] = {}
        self._named: set[tuple[str, int]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.port = 0
        self._handshakes = Handshakes(socket, self._refused)

    def close(self) -> None:
        self._handshakes.close()
        if self._timer is not None:
            self._timer.cancel()

    def _refused(self, reason: str) -> None:
        if reason.startswith(CLOSED):
            return  # by the peer, before there was anything to refuse
        self._counters["refused_connections"] += 1
        if reason == NOT_ADMITTED:
            return  # the doorkeeper, who decided it, knows the address
        self._untold[reason] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_NAMING_SECONDS, self._name)

    def _name(self) -> None:
        # Several may have come since the last look. Who had which reason is not known, so each is told with all.
        self._timer, reason = None, "; ".join(self._untold)
        self._untold.clear()
        closed = lately_closed(self.port)
        fresh, self._named = closed - self._named, closed
        for peer in sorted({address for address, _ in fresh}) or ["unknown"]:
            count = self._told.add((peer, reason))
            if telling(count):
                log.warning("connection_refused", peer=peer, reason=reason, count=count)


def lately_closed(port: int, tables: tuple[Path, ...] = _TABLES) -> set[tuple[str, int]]:
    """(address, port) of whom we hung up on at our `port` in the last minute or so; empty where nobody can tell."""
    found: set[tuple[str, int]] = set()
    for table in tables:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, remote, state, *_ = line.split()
            if int(local.rpartition(":")[2], 16) == port and state in _CLOSED_BY_US:
                address, _, their_port = remote.rpartition(":")
                found.add((_address(address), int(their_port, 16)))
    return found


def _address(text: str) -> str:
    # The kernel prints each 32-bit word of an address, which is in network order, as a number of this machine.
    words = (int(text[i : i + 8], 16) for i in range(0, len(text), 8))
    address = ip_address(b"".join(struct.pack("=I", word) for word in words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
