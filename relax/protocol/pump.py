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


class Pump:
    """Owns a socket. `on_message(frames)` gets at most `max_frames` frames of a message, the first `lead` as bytes and
    the others as zmq frames; `on_writable()` is called once after a `send` that returned False, when sending works."""

    def __init__(
        self,
        socket: zmq.Socket,
        *,
        lead: int,
        max_frames: int,
        on_message: Callable[[list[Any]], None],
        on_writable: Callable[[], None],
    ) -> None:
        self.socket = socket
        self._loop = asyncio.get_running_loop()
        self._lead, self._max = lead, max_frames
        self._on_message, self._on_writable = on_message, on_writable
        self._kicked = self._blocked = self.closed = False
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._ready)
        self._kick()

    def send(self, frames: list[Any]) -> bool:
        """Hand a message to zmq; False when it would block. Raises zmq.ZMQError (EHOSTUNREACH: no such route)."""
        socket, last = self.socket, len(frames) - 1
        try:
            for i, frame in enumerate(frames):
                flags = zmq.NOBLOCK | (zmq.SNDMORE if i < last else 0)
                socket.send(frame, flags, copy=type(frame) is bytes)
        except zmq.Again:
            self._blocked = True
            self._kick()
            return False
        self._kick()
        return True

    def close(self, linger_ms: int) -> None:
        if not self.closed:
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
            for _ in range(DRAIN):
                if self.closed:
                    return
                self._on_message(self._receive())
            self._kick()
        except zmq.Again:
            if self._blocked and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
                self._blocked = False
                self._on_writable()

    def _receive(self) -> list[Any]:
        receive = self.socket.recv
        frames: list[Any] = []
        more = True
        for _ in range(self._lead):
            frames.append(receive(zmq.NOBLOCK))
            more = bool(self.socket.getsockopt(zmq.RCVMORE))
            if not more:
                return frames
        while more:
            frame = receive(zmq.NOBLOCK, copy=False)
            more = frame.more
            if len(frames) < self._max:
                frames.append(frame)
        return frames
