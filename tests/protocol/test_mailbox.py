"""Tell, ask, acknowledge: order, exactly-once, deadlines and the ends of a mailbox."""

import asyncio
import gc

import numpy as np
import pytest

from relax.protocol.core import Bounds
from relax.protocol.envelope import ACK, ASK, HEAD, MAGIC, NAMES, REPLY, TELL
from relax.protocol.errors import (
    EncodeError,
    MailboxClosed,
    PeerError,
    PeerForgotten,
    PeerRefused,
    PeerSilent,
    SchemaError,
)
from relax.protocol.faults import Faults
from tests.protocol.conftest import mailbox, opened, run, until
from tests.protocol.wire import Note, Question, Reply, Tensor


class Collector:
    """Handles tells by keeping them."""

    def __init__(self, delay: float = 0.0) -> None:
        self.got: list = []
        self.senders: list = []
        self.delay = delay

    async def __call__(self, message, sender) -> None:
        if self.delay:
            await asyncio.sleep(self.delay)
        self.got.append(message)
        self.senders.append(sender)

    @property
    def numbers(self) -> list[int]:
        return [m.number for m in self.got]


async def double(message: Question, sender) -> Reply:
    return Reply(2 * message.number)


def test_tells_arrive_in_order_once_and_name_their_sender(bind):
    async def work():
        seen = Collector()
        a, b = mailbox("a", bind("a")), mailbox("b", bind("b"))
        b.on(Note, seen)
        async with opened(a, b):
            await asyncio.gather(*(a.tell(b.endpoint, Note(i), 10.0) for i in range(1000)))
            assert seen.numbers == list(range(1000))
            assert seen.senders[0].name == "a" and seen.senders[0].endpoint == a.endpoint
            assert b.counters["duplicates"] == 0 and a.counters["repeated"] == 0
            await a.close()
            await b.close()

    run(work())


def test_an_ask_has_a_reply_and_a_handler_may_tell_back(bind):
    async def work():
        seen = Collector()
        a, b = mailbox("a", bind("a")), mailbox("b", bind("b"))

        async def answer(message, sender):
            await b.tell(sender, Note(message.number, "asked"), 5.0)
            return Reply(2 * message.number)

        a.on(Note, seen)
        b.on(Question, answer)
        async with opened(a, b):
            replies = await asyncio.gather(*(a.ask(b.endpoint, Question(i), 10.0) for i in range(300)))
            assert replies == [Reply(2 * i) for i in range(300)]
            assert sorted(seen.numbers) == list(range(300))

    run(work())


def test_a_handler_may_answer_nothing(bind):
    async def work():
        a, b = mailbox("a", bind("a")), mailbox("b", bind("b"))
        b.on(Question, Collector())
        async with opened(a, b):
            assert await a.ask(b.endpoint, Question(1), 5.0) is None

    run(work())


def test_large_arrays_arrive_whole_and_read_only(bind):
    async def work():
        seen = Collector()
        a, b = mailbox("a", bind("a")), mailbox("b", bind("b"))
        b.on(Tensor, seen)
        async with opened(a, b):
            sent = np.arange(100 * 2**20 // 8, dtype=np.int64)
            await a.tell(b.endpoint, Tensor(1, sent), 30.0)
            got = seen.got[0].values
            assert np.array_equal(got, sent) and not got.flags.writeable
            # Nothing was repeated although the transfer outlasts the first probes.
            assert a.counters["repeated"] == 0

    run(work())
    gc.collect()


@pytest.mark.parametrize("bind", ["ipc", "inproc"], indirect=True)
def test_a_peer_that_binds_late_gets_everything(bind):
    async def work():
        seen = Collector()
        a, b = mailbox("a", bind("a")), mailbox("b", bind("b"))
        b.on(Note, seen)
        b.on(Question, double)
        async with opened(a):
            tells = [asyncio.create_task(a.tell(bind("b"), Note(i), 20.0)) for i in range(50)]
            ask = asyncio.create_task(a.ask(bind("b"), Question(4), 20.0))
            await asyncio.sleep(0.5)
            assert not any(t.done() for t in tells)
            async with opened(b):
                await asyncio.gather(*tells)
                assert await ask == Reply(8)
                assert seen.numbers == list(range(50))

    run(work())


@pytest.mark.parametrize("graceful", [True, False])
def test_a_peer_that_restarts_at_its_endpoint_is_caught_up(bind, graceful):
    async def work():
        endpoint = bind("b")
        first, second = Collector(), Collector()
        a, b = mailbox("a", bind("a")), mailbox("b", endpoint, incarnation="1")
        b.on(Note, first)
        async with opened(a, b):
            endpoint = b.endpoint
            await asyncio.gather(*(a.tell(endpoint, Note(i), 10.0) for i in range(20)))
            if graceful:
                await b.close()
            else:
                b.abort()
            waiting = [asyncio.create_task(a.tell(endpoint, Note(i), 20.0)) for i in range(20, 60)]
            ask = asyncio.create_task(a.ask(endpoint, Question(21), 20.0))
            await asyncio.sleep(0.3)
            again = mailbox("b", endpoint, incarnation="2")
            again.on(Note, second)
            again.on(Question, double)
            async with opened(again):
                await asyncio.gather(*waiting)
                assert await ask == Reply(42)
                assert first.numbers == list(range(20)) and second.numbers == list(range(20, 60))
                await a.tell(endpoint, Note(60), 10.0)
                assert second.numbers[-1] == 60

    run(work())


def test_a_sender_that_restarts_begins_a_new_sequence(sockets):
    async def work():
        seen = Collector()
        b = mailbox("b", f"ipc://{sockets}/b")
        b.on(Note, seen)
        async with opened(b):
            for life in range(3):
                a = mailbox("a", f"ipc://{sockets}/a", incarnation=str(life))
                async with opened(a):
                    await a.tell(b.endpoint, Note(life), 5.0)
            assert seen.numbers == [0, 1, 2]
            assert [s.incarnation for s in seen.senders] == ["0", "1", "2"]

    run(work())


@pytest.mark.parametrize("seed", range(4))
def test_lost_doubled_and_delayed_messages_change_nothing(sockets, seed):
    async def work():
        seen, asked = Collector(), []
        faults = [Faults(seed * 2 + i, drop=0.05, duplicate=0.05, delay=0.05) for i in (0, 1)]
        bounds = Bounds(probe=0.02, probe_max=0.1)
        a, b = (mailbox(n, f"ipc://{sockets}/{n}", faults=f, bounds=bounds) for n, f in zip("ab", faults, strict=True))

        async def answer(message, sender):
            asked.append(message.number)
            return Reply(2 * message.number)

        b.on(Note, seen)
        b.on(Question, answer)
        async with opened(a, b):
            tells = [a.tell(b.endpoint, Note(i), 30.0) for i in range(600)]
            asks = [a.ask(b.endpoint, Question(i), 30.0) for i in range(200)]
            results = await asyncio.gather(*tells, *asks)
            assert results[600:] == [Reply(2 * i) for i in range(200)]
            assert seen.numbers == list(range(600))
            assert sorted(asked) == list(range(200)), "an ask was handled twice"
            assert b.counters["duplicates"] > 0 and a.counters["repeated"] > 0
            assert min(f.injected for f in faults) > 20

    run(work())


class OneLost(Faults):
    """Loses the first message of an act, and no other."""

    def __init__(self, act: int) -> None:
        super().__init__(0)
        self.act = act

    def send(self, frames, send) -> bool:
        first = next(bytes(frame) for frame in frames if bytes(frame[: len(MAGIC)]) == MAGIC)
        if not self.injected and HEAD.unpack_from(first)[1] == self.act:
            self.injected += 1
            return True
        return send(frames)


@pytest.mark.parametrize("act", [TELL, ASK, ACK, REPLY], ids=lambda act: NAMES[act])
def test_what_is_lost_is_made_up_for_while_others_of_the_same_peer_go_on(sockets, act):
    """A tell is lost, or its acknowledgement, and asks are answered all the time; or the other way round."""

    async def work():
        seen = Collector()
        # The clock of the link is the test's: between two looks of it another message always comes through.
        lost, bounds = OneLost(act), Bounds(probe=1e6, probe_max=1e6)
        a, b = (mailbox(name, f"ipc://{sockets}/{name}", faults=lost, bounds=bounds) for name in "ab")
        b.on(Note, seen)
        b.on(Question, double)

        def tell(number):
            return a.tell(b.endpoint, Note(number), 20.0)

        def ask(number):
            return a.ask(b.endpoint, Question(number), 20.0)

        it, other = (tell, ask) if act in (TELL, ACK) else (ask, tell)
        async with opened(a, b):
            waiting = asyncio.create_task(it(0))
            await until(lambda: lost.injected)
            link = a._links[b.endpoint]
            for number in range(1, 4):
                await other(number)
                link._timer.cancel()
                link._tick()
            assert await waiting == (None if it is tell else Reply(0))
            assert lost.injected == 1 and a.counters["probes"] < 4
            if it is tell:
                assert seen.numbers == [0]

    run(work())


def test_close_right_after_a_tell_delivers(bind):
    async def work():
        seen = Collector(delay=0.001)
        b = mailbox("b", bind("b"))
        b.on(Note, seen)
        async with opened(b):
            for life in range(20):
                a = mailbox("a", bind("a"), incarnation=str(life))
                await a.start()
                for i in range(50):
                    a.tell_nowait(b.endpoint, Note(i))
                await a.close(10.0)
            await b.close(10.0)
            for life in range(20):
                got = [m.number for m, s in zip(seen.got, seen.senders, strict=True) if s.incarnation == str(life)]
                assert got == list(range(50))

    run(work())


def test_two_mailboxes_can_close_at_once(bind):
    async def work():
        seen = Collector()
        a, b = mailbox("a", bind("a")), mailbox("b", bind("b"))
        a.on(Note, seen)
        b.on(Note, seen)
        async with opened(a, b):
            for i in range(100):
                a.tell_nowait(b.endpoint, Note(i))
                b.tell_nowait(a.endpoint, Note(i))
            await asyncio.gather(a.close(10.0), b.close(10.0))
            assert sorted(seen.numbers) == sorted(list(range(100)) * 2)

    run(work())


def test_close_is_bounded_and_names_the_silent_peer(sockets):
    async def work():
        a = mailbox("a", f"ipc://{sockets}/a")
        async with opened(a):
            a.tell_nowait(f"ipc://{sockets}/nobody", Note(1))
            with pytest.raises(PeerSilent, match=r"nobody did not acknowledge note within .*nothing was ever heard"):
                await a.close(0.2)
            await a.close()
            with pytest.raises(MailboxClosed):
                await a.tell(f"ipc://{sockets}/nobody", Note(1), 1.0)

    run(work())


def test_a_silent_peer_and_a_full_window_end_at_the_deadline(sockets):
    async def work():
        nobody = f"ipc://{sockets}/nobody"
        a = mailbox("a", f"ipc://{sockets}/a", bounds=Bounds(window=4))
        async with opened(a):
            results = await asyncio.gather(*(a.tell(nobody, Note(i), 0.2) for i in range(10)), return_exceptions=True)
            assert all(type(r) is PeerSilent and r.kind == "note" and r.waited > 0.1 for r in results)
            with pytest.raises(PeerSilent, match="make room for"):
                a.tell_nowait(nobody, Note(11))
            with pytest.raises(PeerSilent, match="answer question"):
                await a.ask(nobody, Question(1), 0.1)
            assert a.silence(nobody) > 0.1 and a.silence("ipc:///elsewhere") is None

    run(work())


def test_a_slow_receiver_holds_its_senders_back_without_losing_anything(sockets):
    async def work():
        seen = Collector(delay=0.001)
        bounds = Bounds(window=16, inbox=8)
        a, b = mailbox("a", f"ipc://{sockets}/a", bounds=bounds), mailbox("b", f"ipc://{sockets}/b", bounds=bounds)
        b.on(Note, seen)
        async with opened(a, b):
            await asyncio.gather(*(a.tell(b.endpoint, Note(i), 20.0) for i in range(300)))
            inlet = next(iter(b._inlets.values()))
            assert len(inlet.inbox) <= 8
            await b.close(10.0)
            assert seen.numbers == list(range(300))

    run(work())


def test_the_window_counts_bytes_too_and_lets_one_large_message_through(sockets):
    async def work():
        release = asyncio.Event()
        seen = []

        async def slow(message, sender):
            await release.wait()
            seen.append(message.number)

        bounds = Bounds(window_bytes=100_000, inbox_bytes=150_000)
        a, b = mailbox("a", f"ipc://{sockets}/a", bounds=bounds), mailbox("b", f"ipc://{sockets}/b", bounds=bounds)
        b.on(Tensor, slow)
        async with opened(a, b):
            tells = [
                asyncio.create_task(a.tell(b.endpoint, Tensor(i, np.zeros(200_000, np.uint8)), 20.0)) for i in range(5)
            ]
            await asyncio.sleep(0.3)
            assert sum(t.done() for t in tells) == 1
            release.set()
            await asyncio.gather(*tells)
            await until(lambda: seen == list(range(5)))

    run(work())


def test_a_peer_that_does_not_read_never_blocks_another(sockets):
    async def work():
        seen = Collector()
        a, b = mailbox("a", f"ipc://{sockets}/a", bounds=Bounds(window=2)), mailbox("b", f"ipc://{sockets}/b")
        b.on(Note, seen)
        async with opened(a, b):
            stuck = [asyncio.create_task(a.tell(f"ipc://{sockets}/nobody", Note(i), 20.0)) for i in range(20)]
            await asyncio.gather(*(a.tell(b.endpoint, Note(i), 10.0) for i in range(50)))
            assert seen.numbers == list(range(50)) and not any(t.done() for t in stuck)
            a.forget(f"ipc://{sockets}/nobody")
            results = await asyncio.gather(*stuck, return_exceptions=True)
            assert all(type(r) is PeerForgotten for r in results)

    run(work())


def test_a_failing_tell_handler_fails_the_mailbox_and_is_not_repeated(sockets):
    async def work():
        calls = []

        async def broken(message, sender):
            calls.append(message.number)
            raise RuntimeError("cannot take this")

        a, b = mailbox("a", f"ipc://{sockets}/a"), mailbox("b", f"ipc://{sockets}/b")
        b.on(Note, broken)
        async with opened(a, b):
            await a.tell(b.endpoint, Note(1), 5.0)
            with pytest.raises(RuntimeError, match="cannot take this"):
                await asyncio.wait_for(asyncio.shield(b.failed), 5.0)
            with pytest.raises(PeerSilent, match=r"last heard 0\.\d s ago"):
                await a.tell(b.endpoint, Note(2), 0.5)
            assert calls == [1]

    run(work())


def test_a_declared_exception_of_a_handler_is_counted_and_the_next_message_handled(sockets):
    async def work():
        seen = []

        async def picky(message, sender):
            if message.number == 0:
                raise ValueError("zero")
            seen.append(message.number)

        a, b = mailbox("a", f"ipc://{sockets}/a"), mailbox("b", f"ipc://{sockets}/b")
        b.on(Note, picky, tolerate=(ValueError,))
        async with opened(a, b):
            await a.tell(b.endpoint, Note(0), 5.0)
            await a.tell(b.endpoint, Note(1), 5.0)
            await until(lambda: seen == [1])
            assert b.counters["tolerated"] == 1 and not b.failed.done()

    run(work())


def test_a_failing_answer_is_raised_at_the_asker_only(sockets):
    async def work():
        async def broken(message, sender):
            if message.number == 1:
                raise KeyError("no such group")
            if message.number == 2:
                return Reply("two")  # type: ignore[arg-type]
            return Reply(message.number)

        a, b = mailbox("a", f"ipc://{sockets}/a"), mailbox("b", f"ipc://{sockets}/b")
        b.on(Question, broken)
        async with opened(a, b):
            with pytest.raises(PeerError, match=r"b \(ipc://.*\) failed to answer question: KeyError: 'no such group'"):
                await a.ask(b.endpoint, Question(1), 5.0)
            with pytest.raises(PeerError, match="EncodeError: cannot send reply: field number"):
                await a.ask(b.endpoint, Question(2), 5.0)
            assert await a.ask(b.endpoint, Question(3), 5.0) == Reply(3)
            assert b.counters["failed_answers"] == 2 and not b.failed.done()

    run(work())


def test_a_message_without_handler_or_of_another_run_is_refused_at_the_sender(sockets):
    async def work():
        b = mailbox("b", f"ipc://{sockets}/b")
        b.on(Question, double)
        a = mailbox("a", f"ipc://{sockets}/a")
        other = mailbox("o", f"ipc://{sockets}/o", run_id="other")
        old = mailbox("p", f"ipc://{sockets}/p", lineage=3)
        async with opened(a, b, other, old):
            with pytest.raises(PeerRefused, match="b has no handler for this kind"):
                await a.tell(b.endpoint, Note(1), 5.0)
            with pytest.raises(PeerRefused, match="b has no handler"):
                await a.ask(b.endpoint, Note(1), 5.0)
            for m, text in ((other, "run id 'other' is not"), (old, "lineage 3 is not the present lineage 0")):
                with pytest.raises(PeerRefused, match=text):
                    await m.tell(b.endpoint, Note(1), 5.0)
                with pytest.raises(PeerRefused, match=text):
                    await m.ask(b.endpoint, Question(1), 5.0)
            assert await a.ask(b.endpoint, Question(1), 5.0) == Reply(2)
            c = b.counters
            assert (c["refused_unhandled"], c["refused_run"], c["refused_lineage"]) == (2, 2, 2)

    run(work())


def test_the_number_of_answers_under_way_is_bounded(sockets):
    async def work():
        running, most = 0, 0

        async def slow(message, sender):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.02)
            running -= 1
            return Reply(message.number)

        a = mailbox("a", f"ipc://{sockets}/a", bounds=Bounds(probe=0.02, probe_max=0.05))
        b = mailbox("b", f"ipc://{sockets}/b", bounds=Bounds(handlers=5))
        b.on(Question, slow)
        async with opened(a, b):
            replies = await asyncio.gather(*(a.ask(b.endpoint, Question(i), 20.0) for i in range(60)))
            assert [r.number for r in replies] == list(range(60)) and most == 5

    run(work())


def test_an_asker_that_gives_up_leaves_no_answer_behind(sockets):
    async def work():
        async def slow(message, sender):
            await asyncio.sleep(0.2)
            return Reply(1)

        a, b = mailbox("a", f"ipc://{sockets}/a"), mailbox("b", f"ipc://{sockets}/b")
        b.on(Question, slow)
        async with opened(a, b):
            with pytest.raises(PeerSilent):
                await a.ask(b.endpoint, Question(1), 0.05)
            await a.ask(b.endpoint, Question(2), 5.0)
            await until(lambda: not next(iter(b._inlets.values())).owes_answers)

    run(work())


def test_wrong_use_is_an_error_at_once(sockets):
    async def work():
        a = mailbox("a", f"ipc://{sockets}/a")
        with pytest.raises(MailboxClosed, match="not started"):
            await a.tell("inproc://b", Note(1), 1.0)
        with pytest.raises(MailboxClosed, match="before start"):
            _ = a.endpoint
        with pytest.raises(SchemaError, match="no message class"):
            a.on(int, Collector())
        a.on(Note, Collector())
        with pytest.raises(ValueError, match="handles Note already"):
            a.on(Note, Collector())
        a.abort()
        b = mailbox("b", f"ipc://{sockets}/b")
        async with opened(b):
            with pytest.raises(EncodeError, match="field number: expected int, got str"):
                await b.tell("inproc://x", Note("one"), 1.0)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="'nonsense' is no endpoint"):
                await b.tell("nonsense", Note(1), 1.0)
            with pytest.raises(MailboxClosed):
                await b.start()

    run(work())
