"""Who may connect to a socket with keys: the answer to ZAP (ZeroMQ RFC 27), which libzmq asks about every connection.

libzmq knows one such service in a process, at a fixed inproc endpoint. It lives on the asyncio loop of the mailboxes
that need it, from the first that binds to the last that closes.
"""

import asyncio
from typing import Any, ClassVar, Self

import structlog
import zmq
from zmq.utils import z85

from relax.protocol.pump import Pump
from relax.protocol.tally import Tally, telling

log = structlog.get_logger("relax.protocol")
ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"


class Doorkeeper:
    """Admits whoever shows the key that the socket's ZAP domain names, and logs the address of everybody else."""

    _at_work: ClassVar[dict[zmq.Context, "Doorkeeper"]] = {}

    def __init__(self, context: zmq.Context) -> None:
        self._context, self._loop, self._employers = context, asyncio.get_running_loop(), 0
        self._refused = Tally()
        socket = context.socket(zmq.ROUTER)
        socket.linger = 0
        try:
            socket.bind(ENDPOINT)
        except BaseException:
            socket.close()
            raise
        self._pump = Pump(socket, routed=True, max_frames=16, on_message=self._asked, on_writable=lambda: None)

    @classmethod
    def hire(cls, context: zmq.Context) -> Self:
        """The context's doorkeeper; everyone who hires it dismisses it once. To be called before binding."""
        keeper = cls._at_work.get(context)
        if keeper is None:
            keeper = cls._at_work[context] = cls(context)
        elif keeper._loop is not asyncio.get_running_loop():
            raise RuntimeError("mailboxes with keys on two event loops of one process")
        keeper._employers += 1
        return keeper  # type: ignore[return-value]

    def dismiss(self) -> None:
        self._employers -= 1
        if self._employers == 0:
            del self._at_work[self._context]
            # Closing frees the name only some time later.
            self._pump.socket.unbind(ENDPOINT)
            self._pump.close(linger_ms=0)

    def _asked(self, frames: list[Any]) -> None:
        # As ZAP lays it out: empty, version, request id, domain, address, routing id, mechanism, credentials...
        route, _, _, request, domain, address, _, mechanism, *credentials = map(bytes, frames)
        shown = credentials[0] if len(credentials) == 1 else b""
        admitted = mechanism == b"CURVE" and len(shown) == 32 and z85.encode(shown) == domain
        if not admitted:
            self._log(address.decode("ascii", "replace"))
        status = (b"200", b"OK") if admitted else (b"400", b"")
        self._pump.send([route, b"", VERSION, request, *status, b"", b""])

    def _log(self, address: str) -> None:
        count = self._refused.add(address)
        if telling(count):
            log.warning("connection_refused", peer=address, reason="its key is not the key of this run", count=count)
