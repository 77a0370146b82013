"""Who may listen where, and who may connect. Ipc is guarded by file modes; TCP by a key, or by an explicit word.

All processes of a run share one keypair. It is the server's and the client's at once: holding the secret is what lets
a process in, and a peer without it learns nothing, not even that this is Relax.
"""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import zmq

from relax.config.keys import read_secret
from relax.protocol.errors import BindFailed

# A connection that has not shown its key by then is closed.
HANDSHAKE_MS = 10_000


@dataclass(frozen=True, slots=True)
class Keys:
    """The keypair of a run, as Z85 text. The public half is derived and never written anywhere."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: str) -> Self:
        return cls(zmq.curve_public(secret.encode()), secret.encode())

    @classmethod
    def load(cls, directory: Path) -> Self:
        """The keys in `directory`. Raises KeyProblem (`relax.config.keys`)."""
        return cls.of(read_secret(directory))


@dataclass(frozen=True, slots=True)
class Security:
    """What every socket of a mailbox is given. With `keys`, every TCP connection is encrypted and authenticated both
    ways (CURVE); `insecure` allows TCP in plain text beyond loopback."""

    insecure: bool = False
    keys: Keys | None = None

    def __post_init__(self) -> None:
        if self.insecure and self.keys is not None:
            raise ValueError("keys and plain text exclude each other")

    @classmethod
    def of(cls, insecure: bool, keys: Path | None) -> Self:
        """From the options of a run. Raises KeyProblem."""
        return cls(insecure, None if keys is None else Keys.load(keys))

    def check_bind(self, endpoint: str) -> None:
        """Raises BindFailed for a TCP endpoint that other hosts can reach without `keys` or `insecure`."""
        if not endpoint.startswith("tcp://") or self.keys or self.insecure or _is_loopback(host_of(endpoint)):
            return
        raise BindFailed(
            endpoint, "other hosts can reach it in plain text; bind to 127.0.0.1, give --keys, or allow --insecure"
        )

    def guards(self, endpoint: str) -> bool:
        """Whether connections to this endpoint need the key."""
        return self.keys is not None and endpoint.startswith("tcp://")

    def apply(self, socket: zmq.Socket, endpoint: str, server: bool) -> None:
        """Set up a new socket, before it binds to `endpoint` (`server`) or connects to it."""
        if not self.guards(endpoint):
            return
        assert self.keys is not None
        socket.curve_publickey, socket.curve_secretkey = self.keys.public, self.keys.secret
        if server:
            socket.curve_server = True
            # The domain travels to the doorkeeper, which admits exactly the key that it names. Without a doorkeeper
            # libzmq would admit every key; enforced, it admits none.
            socket.zap_domain = self.keys.public
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            socket.handshake_ivl = HANDSHAKE_MS
        else:
            socket.curve_serverkey = self.keys.public


def host_of(endpoint: str) -> str:
    """`tcp://[::1]:7000` -> `::1`."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def port_of(endpoint: str) -> int:
    """`tcp://[::1]:7000` -> 7000."""
    return int(endpoint.rpartition(":")[2])


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
