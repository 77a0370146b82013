"""A mailbox for code that has no event loop: the training loop of a rank, a script."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from relax.protocol.mailbox import Mailbox

T = TypeVar("T")
MAX_POSTED = 1024


class MailboxThread:
    """Runs a mailbox on an event loop in a thread of its own. Handlers run in that thread.

    thread = MailboxThread(mailbox)        # handlers are registered on it before start()
    thread.start()
    reply = thread.call(mailbox.ask(endpoint, message, 5.0), deadline=6.0)
    thread.post(mailbox.tell(endpoint, message))
    thread.close()
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        # Gets the first exception of a tell's handler or of a posted coroutine.
        self.failed: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name=f"mailbox {mailbox.name}", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._posted: set[asyncio.Task[Any]] = set()
        self._room = threading.BoundedSemaphore(MAX_POSTED)

    def start(self, deadline: float = 10.0) -> None:
        """Start the thread and bind. Raises BindFailed."""
        self._thread.start()
        self._started.result(deadline)

    def call(self, work: Coroutine[Any, Any, T], deadline: float) -> T:
        """Run `work` on the mailbox's loop and wait for its result, `deadline` seconds at most; then it is cancelled
        and TimeoutError raised. Not for the mailbox's own thread."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(deadline)
        except TimeoutError:
            future.cancel()
            raise

    def post(self, work: Coroutine[Any, Any, Any], deadline: float = 60.0) -> None:
        """Run `work` on the mailbox's loop without waiting; posted work starts in the order of the calls and its
        exception sets `failed`. Waits `deadline` seconds at most while 1024 are under way, then raises TimeoutError."""
        if not self._room.acquire(timeout=deadline):
            work.close()
            raise TimeoutError(f"{MAX_POSTED} posted to mailbox {self.mailbox.name} are still under way")
        self._loop.call_soon_threadsafe(self._begin, work)

    def close(self, deadline: float = 10.0) -> None:
        """Finish what was posted, deliver everything, stop the thread and join it. Raises what `Mailbox.close` does."""
        if not self._thread.is_alive():
            return
        try:
            self.call(self._finish(deadline), deadline + 5.0)
        finally:
            self.abort()

    def abort(self) -> None:
        """Stop at once and join the thread. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10.0)

    def _run(self) -> None:
        uvloop.run(self._main())

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            await self.mailbox.start()
        except BaseException as error:
            self._started.set_exception(error)
            return
        self.mailbox.failed.add_done_callback(self._watch)
        self._started.set_result(None)
        await self._stop.wait()
        self.mailbox.abort()

    async def _finish(self, deadline: float) -> None:
        end = self._loop.time() + deadline
        if self._posted:
            await asyncio.wait(self._posted, timeout=deadline)
        await self.mailbox.close(max(0.0, end - self._loop.time()))

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(work)
        self._posted.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._posted.discard(task)
        self._room.release()
        self._watch(task)

    def _watch(self, finished: asyncio.Future[Any]) -> None:
        if not finished.cancelled() and (error := finished.exception()) is not None and not self.failed.done():
            self.failed.set_exception(error)
