"""Two hosts on one machine: network and mount namespaces, joined by a wire. No privilege is needed where the kernel
lets users have namespaces of their own.

Each host has its own loopback, its own address, its own /dev/shm and its own /run; files and processes are shared.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

ENTER = ("-U", "-n", "-m", "--preserve-credentials")
HOLD = ("sh", "-c", "echo there; exec sleep 3600")


class NoNamespaces(Exception):
    """This machine does not let us; the text is its reason."""


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    pid: int  # of the process that holds its namespaces

    def command(self, command: Sequence[object]) -> list[str]:
        """A command, as it is run on this host."""
        return ["nsenter", "-t", str(self.pid), *ENTER, *map(str, command)]

    def start(self, command: Sequence[object], **given: Any) -> subprocess.Popen[str]:
        environment = os.environ | {"XDG_RUNTIME_DIR": "/run"}
        return subprocess.Popen(self.command(command), text=True, env=environment, **given)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """`left` at 10.77.0.1 and `right` at 10.77.0.2, until the block ends. Raises NoNamespaces."""
    with contextlib.ExitStack() as stack:
        left = Host("left", "10.77.0.1", _hold(stack, ["unshare", "-U", "-r", "-n", "-m", *HOLD]))
        right = Host("right", "10.77.0.2", _hold(stack, left.command(["unshare", "-n", "-m", *HOLD])))
        _do(left, "ip", "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", str(right.pid))
        for host in (left, right):
            _do(host, "ip", "addr", "add", f"{host.address}/24", "dev", "wire")
            for link in ("wire", "lo"):
                _do(host, "ip", "link", "set", link, "up")
            for place in ("/dev/shm", "/run"):
                _do(host, "mount", "-t", "tmpfs", "tmpfs", place)
        yield left, right


def _hold(stack: contextlib.ExitStack, command: list[str]) -> int:
    try:
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError as error:
        raise NoNamespaces(str(error)) from None
    stack.callback(holder.communicate)
    stack.callback(holder.kill)
    assert holder.stdout is not None and holder.stderr is not None
    if holder.stdout.readline() != "there\n":
        raise NoNamespaces(f"{command[0]}: {holder.stderr.read().strip()}")
    return holder.pid


def _do(host: Host, *command: str) -> None:
    try:
        done = subprocess.run(host.command(command), capture_output=True, text=True, timeout=20)
    except FileNotFoundError as error:
        raise NoNamespaces(str(error)) from None
    if done.returncode != 0:
        raise NoNamespaces(f"{' '.join(command)}: {done.stderr.strip()}")
