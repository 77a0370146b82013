"""Binding: the real endpoint, refusals that name it, and owners alive and dead."""

import subprocess
import sys

import pytest

from relax.protocol.errors import BindFailed
from relax.protocol.security import Security
from tests.protocol.conftest import mailbox, opened, run
from tests.protocol.wire import Note


def bind_fails(endpoint: str, match: str, security: Security | None = None) -> None:
    async def work():
        with pytest.raises(BindFailed, match=match):
            await mailbox("b", endpoint, security=security).start()

    run(work())


def test_port_zero_gives_each_mailbox_its_own_real_port():
    async def work():
        a, b = mailbox("a", "tcp://127.0.0.1:0"), mailbox("b", "tcp://127.0.0.1:0")
        async with opened(a, b):
            ports = {int(m.endpoint.rpartition(":")[2]) for m in (a, b)}
            assert len(ports) == 2 and 0 not in ports
            bind_again = mailbox("c", a.endpoint)
            with pytest.raises(BindFailed, match=f"cannot bind {a.endpoint}: Address already in use"):
                await bind_again.start()

    run(work())


def test_an_ipc_endpoint_of_a_living_mailbox_is_not_taken_over(sockets):
    async def work():
        endpoint, got = f"ipc://{sockets}/b", []

        async def keep(message, sender):
            got.append(message.number)

        a, b = mailbox("a", f"ipc://{sockets}/a"), mailbox("b", endpoint)
        b.on(Note, keep)
        async with opened(a, b):
            with pytest.raises(BindFailed, match="a living process listens there"):
                await mailbox("c", endpoint).start()
            await a.tell(endpoint, Note(1), 5.0)
            assert got == [1]
        assert list(sockets.iterdir()) == []

    run(work())


def test_an_ipc_endpoint_of_a_killed_process_is_free_again(sockets):
    endpoint = f"ipc://{sockets}/b"
    code = f"""
import asyncio
from relax.protocol.mailbox import Mailbox
async def main():
    await Mailbox("b", run_id="run", lineage=0, incarnation="1", bind={endpoint!r}).start()
    print("up", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        bind_fails(endpoint, "a living process listens there")
    finally:
        child.kill()
        child.wait(10)
    assert (sockets / "b").exists()

    async def work():
        async with opened(mailbox("b", endpoint)):
            assert oct((sockets / "b").stat().st_mode)[-3:] == "600"

    run(work())


@pytest.mark.parametrize(
    ("endpoint", "match"),
    [
        ("ipc:///nowhere/at/all.sock", "there is no directory /nowhere/at"),
        ("ipc:///tmp/" + "x" * 120, "the path takes 125 bytes, a socket path holds at most 107"),
        ("tcp://0.0.0.0:0", "other hosts can reach it in plain text"),
        ("tcp://192.0.2.7:0", "other hosts can reach it in plain text"),
        ("http://x", r"not one of ipc://PATH, tcp://HOST:PORT"),
        ("tcp://127.0.0.1:http", "cannot bind tcp://127.0.0.1:http"),
    ],
)
def test_an_endpoint_that_cannot_be_is_refused_with_the_reason(endpoint, match):
    bind_fails(endpoint, match)


def test_with_insecure_only_a_real_interface_may_be_named():
    bind_fails("tcp://0.0.0.0:0", "a wildcard is no address", Security(insecure=True))
    bind_fails("tcp://192.0.2.7:0", "Cannot assign requested address|No such device", Security(insecure=True))


def test_a_process_that_forgets_to_close_still_ends(sockets):
    code = f"""
import asyncio
from relax.protocol.mailbox import Mailbox
from relax.protocol.payload import FetchPayload
async def main():
    a = Mailbox("a", run_id="run", lineage=0, incarnation="1", bind="ipc://{sockets}/a")
    await a.start()
    for i in range(100):
        a.tell_nowait("ipc://{sockets}/nobody", FetchPayload("x"))
    await asyncio.sleep(0.1)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=30, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
