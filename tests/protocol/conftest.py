"""Mailboxes for tests: a short directory for sockets, and a check that nothing stays behind."""

import asyncio
import contextlib
import shutil
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from relax.protocol.mailbox import Mailbox


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A directory for ipc sockets: pytest's own are too deep for a socket path."""
    directory = Path(tempfile.mkdtemp(prefix="rx-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(params=["ipc", "inproc", "tcp"])
def bind(request: pytest.FixtureRequest, sockets: Path):
    """name -> an endpoint to bind, on each transport."""
    made = {
        "ipc": lambda name: f"ipc://{sockets}/{name}.sock",
        "inproc": lambda name: f"inproc://{sockets.name}-{name}",
        "tcp": lambda name: "tcp://127.0.0.1:0",
    }
    return made[request.param]


def mailbox(name: str, bind: str, **changes: Any) -> Mailbox:
    values: dict[str, Any] = {"run_id": "run", "lineage": 0, "incarnation": f"{name}-a", "bind": bind}
    return Mailbox(name, **(values | changes))


def run(work: Coroutine[Any, Any, Any], seconds: float = 60.0) -> Any:
    """Run a test's coroutine on uvloop; no task of it may be left, and every socket must be closed."""
    before = set(threading.enumerate())

    async def bounded() -> Any:
        result = await asyncio.wait_for(work, seconds)
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left behind: {left}"
        return result

    result = uvloop.run(bounded())
    # pyzmq keeps one thread of its own that frees the buffers of messages sent without a copy.
    left = {t for t in set(threading.enumerate()) - before if "GarbageCollector" not in type(t).__name__}
    assert not left, f"threads left behind: {left}"
    open_sockets = [s for s in zmq.Context.instance()._sockets if not s.closed]
    assert not open_sockets, f"sockets left open: {open_sockets}"
    return result


async def until(condition, seconds: float = 20.0) -> None:
    """Wait for a condition that other tasks bring about."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (the condition is a plain fact, nobody signals it)
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def opened(*mailboxes: Mailbox):
    """Start mailboxes, and abort whatever is still open at the end."""
    try:
        for m in mailboxes:
            await m.start()
        yield mailboxes
    finally:
        for m in mailboxes:
            m.abort()
