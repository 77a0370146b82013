"""The processes that vLLM starts, watched from this one's loop: the end of one is known at once and with its reason."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

REAPED_SECONDS = 1.0
"""How long the exit code of an ended process may take to be known."""


class Processes:
    """`ended(reason)` is called from the loop when one of them ends by itself."""

    def __init__(self, ended: Callable[[str], None]) -> None:
        self._ended = ended
        self._watched: dict[int, Any] = {}  # pidfd -> process

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._watched.values())

    def watch(self, processes: Iterable[Any]) -> None:
        for process in processes:
            fd = os.pidfd_open(process.pid)
            self._watched[fd] = process
            asyncio.get_running_loop().add_reader(fd, self._process_ended, fd)

    def let_go(self) -> list[Any]:
        """Watches them no more, as they are about to be ended; returns them."""
        return [self._forget(fd) for fd in list(self._watched)]

    def _forget(self, fd: int) -> Any:
        process = self._watched.pop(fd)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        return process

    def _process_ended(self, fd: int) -> None:
        process = self._forget(fd)
        # vLLM's own monitor waits for the same child: where it has reaped it, the code is known a moment later.
        give_up = time.monotonic() + REAPED_SECONDS
        while (code := process.exitcode) is None and time.monotonic() < give_up:
            time.sleep(0.005)
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        self._ended(f"vLLM's process {process.pid} ended by {how}; its last lines are in this service's output")
