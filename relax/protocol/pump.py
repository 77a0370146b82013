"""A zmq socket on an asyncio loop: callbacks for what arrives, sends that never wait.

zmq's file descriptor is edge-triggered and a send may swallow its edge, so the socket is looked at again after every
send; and it is drained to a bound per wake-up, because a wake-up per message doubles the cost of small ones and a
drain without bound starves everything else on the loop.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import zmq

DRAIN = 64
# Large messages are handled, and their memory used again, before more are read: fresh pages cost many times a copy.
DRAIN_BYTES = 4 * 2**20
# As plain numbers: combining pyzmq's enum flags costs as much as a small send.
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)


class Pump:
    """Owns a socket.

    `on_message(frames)` gets at most `max_frames` frames of a message: the routing id, if the socket is `routed`, and
    the first frame as bytes, the others as zmq frames. `on_writable()` is called once after a `send` that returned
    False, when sending works again.
    """

    def __init__(
        self,
        socket: zmq.Socket,
        *,
        routed: bool,
        max_frames: int,
        on_message: Callable[[list[Any]], None],
        on_writable: Callable[[], None],
    ) -> None:
        self.socket = socket
        self._loop = asyncio.get_running_loop()
        self._routed, self._max = routed, max_frames
        self._on_message, self._on_writable = on_message, on_writable
        self._kicked = self._blocked = self.closed = False
        self._received = 0
        self._first: zmq.Frame | None = None
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._ready)
        self._kick()

    def send(self, frames: list[Any]) -> bool:
        """Hand a message to zmq; False when it would block. Raises zmq.ZMQError (EHOSTUNREACH: no such route)."""
        socket, last = self.socket, len(frames) - 1
        try:
            for i, frame in enumerate(frames):
                socket.send(frame, _NOBLOCK_MORE if i < last else _NOBLOCK, copy=type(frame) is bytes)
        except zmq.Again:
            self._blocked = True
            self._kick()
            return False
        self._kick()
        return True

    def origin(self) -> str:
        """The address from which the message came that is being handled, as far as zmq knows it."""
        try:
            return "" if self._first is None else str(self._first.get("Peer-Address"))
        except zmq.ZMQError:
            return ""

    def close(self, linger_ms: int) -> None:
        if not self.closed:
            self._first = None
            self.closed = True
            self._loop.remove_reader(self._fd)
            self.socket.close(linger=linger_ms)

    def _kick(self) -> None:
        if not self._kicked:
            self._kicked = True
            self._loop.call_soon(self._again)

    def _again(self) -> None:
        self._kicked = False
        self._ready()

    def _ready(self) -> None:
        try:
            self._received = 0
            for _ in range(DRAIN):
                if self.closed:
                    return
                self._on_message(self._receive())
                if self._received > DRAIN_BYTES:
                    break
            self._kick()
        except zmq.Again:
            if self._blocked and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
                self._blocked = False
                self._on_writable()

    def _receive(self) -> list[Any]:
        receive = self.socket.recv
        # A ROUTER puts the routing id before every message; there is always more behind it.
        frames: list[Any] = [receive(_NOBLOCK)] if self._routed else []
        self._first = first = receive(_NOBLOCK, copy=False)
        frames.append(first.bytes)
        more = first.more
        while more:
            frame = receive(_NOBLOCK, copy=False)
            more = frame.more
            if len(frames) < self._max:
                frames.append(frame)
                self._received += len(frame)
        return frames
