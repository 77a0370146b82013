"""The parent's side of one reward worker process."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from typing import Any

from relax.rewards import wire
from relax.rewards.score import Item
from relax.rewards.spec import VerifierSpec


class RewardPoolError(RuntimeError):
    """The pool cannot score at all: its function does not load, its workers do not start, or it was closed."""


class ChildDiedError(Exception):
    """The worker process ended, or wrote something that is no reply."""


class Child:
    """One worker process, warm once `start` returns. After `kill`, in whatever state, nothing of it is left."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls, spec: VerifierSpec, deadline: float) -> "Child":
        """A worker that has imported its function. Raises RewardPoolError when it has not within `deadline` seconds."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            process = await asyncio.create_subprocess_exec(
                *wire.command(theirs.fileno(), spec),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        child = cls(process, reader, writer)
        try:
            async with asyncio.timeout(deadline):
                reply = await child._receive()
        except TimeoutError:
            await child.kill()
            raise RewardPoolError(f"the worker of {spec.function} was not ready within {deadline} s") from None
        except ChildDiedError:
            raise RewardPoolError(
                f"the worker of {spec.function} ended at start with {await child.kill(1.0)}"
            ) from None
        except asyncio.CancelledError:
            await child.kill()
            raise
        if "error" in reply:
            await child.kill()
            raise RewardPoolError(f"reward function {spec.function} cannot be loaded:\n{reply['error']}")
        return child

    async def score(self, item: Item, deadline: float) -> dict[str, Any]:
        """The worker's reply. Raises TimeoutError after `deadline` seconds and ChildDiedError when the worker ends."""
        async with asyncio.timeout(deadline):
            try:
                self._writer.write(wire.encode(item.fields()))
                await self._writer.drain()
            except ConnectionError:
                raise ChildDiedError from None
            return await self._receive()

    async def kill(self, grace: float = 0.0) -> str:
        """Ends the process and all that its function started; says how it ended.

        `grace` is how many seconds it may take to end by itself, so that a death can be told from this kill.
        """
        self._writer.close()
        if grace > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(ProcessLookupError):  # the worker makes itself the leader of its group
            os.killpg(self._process.pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            status = await self._process.wait()
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"

    async def _receive(self) -> dict[str, Any]:
        try:
            (length,) = wire.LENGTH.unpack(await self._reader.readexactly(wire.LENGTH.size))
            if length > wire.MAX_FRAME:
                raise ChildDiedError
            return json.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            raise ChildDiedError from None
