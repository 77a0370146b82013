"""Who may listen where. Ipc is guarded by file modes; TCP beyond loopback needs an explicit word."""

import ipaddress
from dataclasses import dataclass

import zmq

from relax.protocol.errors import BindFailed


@dataclass(frozen=True, slots=True)
class Security:
    """What every socket of a mailbox is given. `insecure` allows TCP in plain text beyond loopback."""

    insecure: bool = False

    def check_bind(self, endpoint: str) -> None:
        """Raises BindFailed for a TCP endpoint that other hosts can reach without `insecure`."""
        if not endpoint.startswith("tcp://") or self.insecure or _is_loopback(host_of(endpoint)):
            return
        raise BindFailed(endpoint, "other hosts can reach it in plain text; bind to 127.0.0.1 or allow --insecure")

    def apply(self, socket: zmq.Socket, server: bool) -> None:
        """Set up a new socket, before it binds (`server`) or connects. The place for keys."""


def host_of(endpoint: str) -> str:
    """`tcp://[::1]:7000` -> `::1`."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
