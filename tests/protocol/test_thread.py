"""A mailbox used from code that has no event loop."""

import asyncio
import threading
import time

import pytest

from relax.protocol.errors import BindFailed, MailboxClosed
from relax.protocol.thread import MailboxThread
from tests.protocol.conftest import mailbox
from tests.protocol.wire import Note, Question, Reply


@pytest.fixture
def pair(sockets):
    """Two mailboxes on threads; `b` keeps notes and doubles questions."""
    before = threading.active_count()
    got: list[int] = []

    async def keep(message, sender):
        if message.number < 0:
            raise ValueError("negative")
        got.append(message.number)

    async def double(message, sender):
        return Reply(2 * message.number)

    a, b = (MailboxThread(mailbox(n, f"ipc://{sockets}/{n}")) for n in "ab")
    b.mailbox.on(Note, keep)
    b.mailbox.on(Question, double)
    a.start()
    b.start()
    yield a, b, got
    a.abort()
    b.abort()
    assert threading.active_count() == before


def test_calls_return_and_posts_are_delivered_in_order_before_close_returns(pair):
    a, b, got = pair
    for i in range(200):
        a.post(a.mailbox.tell(b.mailbox.endpoint, Note(i), 10.0))
    assert a.call(a.mailbox.ask(b.mailbox.endpoint, Question(4), 5.0), 6.0) == Reply(8)
    a.close()
    b.close()
    assert got == list(range(200))
    assert not a.failed.done() and not b.failed.done()
    with pytest.raises(MailboxClosed):
        asyncio.run(a.mailbox.tell("x", Note(1), 1.0))


def test_a_call_past_its_deadline_is_cancelled(pair):
    a, _, _ = pair
    cancelled = threading.Event()

    async def forever():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError):
        a.call(forever(), 0.05)
    assert cancelled.wait(5.0)


def test_failures_of_posts_and_handlers_reach_the_owner(pair):
    a, b, _ = pair
    a.post(a.mailbox.tell(b.mailbox.endpoint, Note(-1), 5.0))
    with pytest.raises(ValueError, match="negative"):
        b.failed.result(5.0)
    a.post(a.mailbox.tell(b.mailbox.endpoint, Note("x"), 5.0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="field number"):
        a.failed.result(5.0)


def test_a_failed_bind_is_raised_by_start_and_leaves_no_thread(pair):
    _, b, _ = pair
    again = MailboxThread(mailbox("b", b.mailbox.endpoint))
    with pytest.raises(BindFailed, match="a living process"):
        again.start()
    again.close()
    end = time.monotonic() + 5
    while again._thread.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    assert not again._thread.is_alive()
