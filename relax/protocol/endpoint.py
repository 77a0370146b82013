"""Taking an endpoint, so that a living owner is never robbed and a dead one never blocks.

zmq unlinks whatever lies at an ipc path before it binds there, also the socket of a living process. So an ipc endpoint
is owned through an flock on a file beside it, which a death frees.
"""

import contextlib
import fcntl
import os
from collections import Counter
from pathlib import Path

import zmq

from relax.protocol.doorkeeper import Doorkeeper
from relax.protocol.errors import BindFailed
from relax.protocol.handshakes import Refusals
from relax.protocol.security import Security, host_of, port_of

IPC_PATH_MAX = 107
_WILDCARDS = ("0.0.0.0", "::", "*", "")


class Binding:
    """A bound socket's endpoint: `endpoint` is the real one, as peers shall use it."""

    def __init__(self, socket: zmq.Socket, endpoint: str, security: Security, counters: Counter[str]) -> None:
        """Raises BindFailed naming the endpoint and the reason. `counters` get what is refused there."""
        self._socket, self._lock, self._path = socket, -1, Path()
        self._doorkeeper: Doorkeeper | None = None
        self._refusals: Refusals | None = None
        security.check_bind(endpoint)
        if endpoint.startswith("ipc://"):
            self._path = Path(endpoint.removeprefix("ipc://"))
            self._lock = _lock(endpoint, self._path)
        elif endpoint.startswith("tcp://"):
            if host_of(endpoint) in _WILDCARDS:
                raise BindFailed(endpoint, "a wildcard is no address that peers can connect to; name the interface")
        elif not endpoint.startswith("inproc://"):
            raise BindFailed(endpoint, "not one of ipc://PATH, tcp://HOST:PORT (0: any free port), inproc://NAME")
        if endpoint.startswith("tcp://"):
            self._refusals = Refusals(socket, counters)
        if security.guards(endpoint):
            self._doorkeeper = Doorkeeper.hire(socket.context)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._give_up()
            raise BindFailed(endpoint, error.strerror or str(error)) from error
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT) or endpoint
        if self._refusals is not None:
            self._refusals.port = port_of(self.endpoint)
        if self._lock >= 0:
            self._path.chmod(0o600)

    def release(self) -> None:
        """Stop listening and give the endpoint back."""
        with contextlib.suppress(zmq.ZMQError):  # an inproc endpoint cannot be unbound
            self._socket.unbind(self.endpoint)
        if self._lock >= 0:
            self._path.unlink(missing_ok=True)
        self._give_up()

    def _give_up(self) -> None:
        if self._refusals is not None:
            self._refusals.close()
        if self._doorkeeper is not None:
            self._doorkeeper.dismiss()
            self._doorkeeper = None
        if self._lock >= 0:
            _lock_path(self._path).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _lock(endpoint: str, path: Path) -> int:
    if len(os.fsencode(path)) > IPC_PATH_MAX:
        problem = f"the path takes {len(os.fsencode(path))} bytes, a socket path holds at most {IPC_PATH_MAX}"
        raise BindFailed(endpoint, f"{problem}; choose a shorter runtime directory")
    if not path.parent.is_dir():
        raise BindFailed(endpoint, f"there is no directory {path.parent}")
    while True:
        fd = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise BindFailed(endpoint, "a living process listens there") from None
        # The former owner may have removed the file between our open and our lock.
        with contextlib.suppress(FileNotFoundError):
            if _lock_path(path).stat().st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)
