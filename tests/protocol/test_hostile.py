"""Bytes that no mailbox would send: refused and counted, while valid traffic goes on."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import msgpack
import numpy as np
import pytest
import structlog
import zmq

from relax.protocol.codec import encode, schema_of
from relax.protocol.core import Bounds
from relax.protocol.envelope import ACK, ASK, HEAD, MAGIC, PROBE, REPLY, SETTLED, TELL, URGENT, parse
from relax.protocol.envelope import head as head_of
from relax.protocol.errors import Refused
from relax.protocol.frames import Limits
from relax.protocol.mailbox import Mailbox
from tests.protocol.conftest import mailbox, opened, run, until
from tests.protocol.wire import Note, Question, Reply, Tensor

LIMITS = Limits(header_bytes=100_000, frame_bytes=300_000, message_bytes=400_000, frames=8)
ADDRESS = ["run", 0, "stranger", "x", 1, "ipc:///nowhere"]
NUMBERS = itertools.count()


@dataclass(frozen=True)
class head:  # noqa: N801  (reads as what it makes: head(...) + header)
    """The head of a first frame, put before a header by `+`."""

    act: int
    flags: int
    number: int
    base: int

    def __add__(self, header: bytes) -> bytes:
        return head_of(self.act, self.flags, self.number, self.base, header) + header


def packed(*rest, address=None) -> bytes:
    """An address and what follows it; by default of a sender never heard before, whose sequence begins."""
    address = address or [*ADDRESS[:2], f"stranger-{next(NUMBERS)}", *ADDRESS[3:]]
    return msgpack.packb([*address, *rest])


def tell(seq: int, message, base: int = 1, address=None) -> list[bytes]:
    """What a mailbox would send, of a message without small arrays."""
    first, *frames = encode(message)
    return [head(TELL, 0, seq, base) + packed(*msgpack.unpackb(first[4:]), address=address), *map(bytes, frames)]


def body(**fields) -> list:
    schema = schema_of(Note)
    return ["note", schema.fingerprint, list(fields.values())]


def nested(depth: int) -> list:
    innermost: list = []
    for _ in range(depth):
        innermost = [innermost]
    return innermost


MALFORMED = {
    "header": [
        [b""],
        [b"GET / HTTP/1.1"],
        [HEAD.pack(b"Rx\x02", TELL, 0, 9, 1, 1) + packed(*body(number=1, text=""))],
        [HEAD.pack(MAGIC, 77, 0, 9, 1, 1) + packed()],
        [head(TELL, 0, 1, 1) + b""],
        [head(TELL, 0, 1, 1) + b"\xc1"],
        [head(TELL, 0, 1, 1) + b"\xdf\xff\xff\xff\xff"],
        [head(TELL, 0, 1, 1) + b"\x91" * 3000],
        [head(TELL, 0, 1, 1) + msgpack.packb({"a": 1})],
        [head(TELL, 0, 1, 1) + packed(address=["run", "0", "stranger", "x", 1, "e"])],
        [head(TELL, 0, 1, 1) + packed(address=["run", 0, "s" * 10_000, "x", 1, "e"])],
        [head(TELL, 0, 1, 1) + packed("note")],
        [head(ASK, 0, 1, 1) + packed()],
        [head(PROBE, 0, 1, 1) + packed(1)],
        [head(PROBE, 0, 1, 1) + packed("1", [])],
        [head(ACK, 0, 1, 1) + packed(None, [])],
        [head(REPLY, 0, 1, 1) + packed(*body(number=1, text=""))],
        [head(TELL, 0, 2**64 - 1, 2**64 - 1) + packed(*body(number=1, text=""))],
        [head(TELL, URGENT, 1, 2**61) + packed(*body(number=1, text=""))],
        [head(PROBE, 0, 1, 2**64 - 1) + packed(1, [])],
        [head(TELL, 0, 1, 1) + packed("note", 1, msgpack.ExtType(5, b"x"))],
    ],
    "kind": [
        [head(TELL, 0, 1, 1) + packed("exploit", 1, [])],
        [head(ASK, 0, 1, 1) + packed(None, 1, [])],
        [head(TELL, 0, 1, 1) + packed(nested(900), 1, [])],
    ],
    "schema": [[head(TELL, 0, 1, 1) + packed("note", 12345, [1, ""])]],
    "type": [
        [head(TELL, 0, 1, 1) + packed(*body(number="1", text=""))],
        [head(TELL, 0, 1, 1) + packed(*body(number=1))],
        [head(TELL, 0, 1, 1) + packed(*body(number=nested(900), text=""))],
        [head(TELL, 0, 1, 1) + packed(*body(number=list(range(20_000)), text=""))],
    ],
    "array": [[tell(1, Tensor(1, np.zeros(50_000, np.uint8)))[0], b"too short"]],
    "frames": [
        [*tell(1, Note(1)), b"more"],
        tell(1, Tensor(1, np.zeros(50_000, np.uint8)))[:1],
        [*tell(1, Note(1)), *[b"x"] * 5000],
        [tell(1, Note(1))[0] + b"behind the header"],
    ],
    "size": [[*tell(1, Note(1)), b"x" * 300_001], [head(TELL, 0, 1, 1) + b"x" * 200_000]],
    "unhandled": [tell(1, Reply(1))],
    "run": [[head(TELL, 0, 1, 1) + packed(*body(number=1, text=""), address=["other", *ADDRESS[1:]])]],
    "lineage": [[head(TELL, 0, 1, 1) + packed(*body(number=1, text=""), address=["run", 9, *ADDRESS[2:]])]],
}


async def under_attack(sockets, attack) -> Mailbox:
    """Run `attack(send, mailbox)` against a mailbox that serves a well-behaved peer all the while; check it did."""
    got = []
    ended = asyncio.Event()

    async def keep(message, sender):
        if sender.name == "a":
            got.append(message.number)
        if sender.name == "end":
            ended.set()

    async def double(message, sender):
        return Reply(2 * message.number)

    bounds = Bounds(limits=LIMITS, offences=2**30)
    a, b = mailbox("a", f"ipc://{sockets}/a"), mailbox("b", f"ipc://{sockets}/b", bounds=bounds)
    b.on(Note, keep)
    b.on(Tensor, keep)
    b.on(Question, double)
    async with opened(a, b):
        raw = zmq.Context.instance().socket(zmq.DEALER)
        raw.sndhwm = 0
        raw.connect(b.endpoint)

        async def talk():
            for i in range(100):
                await a.tell(b.endpoint, Note(i), 10.0)
                assert await a.ask(b.endpoint, Question(i), 10.0) == Reply(2 * i)

        def send(frames):
            raw.send_multipart(frames, zmq.NOBLOCK)

        talking = asyncio.create_task(talk())
        try:
            await attack(send, b)
            # A connection keeps its order: when this arrives, all of the attack was read.
            send(tell(1, Note(1), address=["run", 0, "end", *ADDRESS[3:]]))
            await ended.wait()
            await talking
        finally:
            raw.close(linger=0)
        assert got == list(range(100)) and not b.failed.done()
    return b


@pytest.mark.parametrize("reason", MALFORMED)
def test_malformed_messages_are_refused_and_counted_by_reason(sockets, reason):
    async def attack(send, b):
        for i, frames in enumerate(MALFORMED[reason]):
            send(frames)
            await until(lambda n=i + 1: b.counters["refused"] == n)
            assert b.counters[f"refused_{reason}"] == i + 1, frames[0][:60]

    run(under_attack(sockets, attack))


def test_replayed_reordered_and_far_ahead_tells_are_counted_and_not_delivered(sockets):
    async def attack(send, b):
        send(tell(1, Note(1), address=ADDRESS))
        send(tell(1, Note(1), address=ADDRESS))
        send(tell(2**59, Note(1), address=ADDRESS))
        send(tell(3, Note(3), address=ADDRESS))
        await until(lambda: b.counters["out_of_order"] == 2)
        assert b.counters["duplicates"] == 1
        send([head(SETTLED, 0, 2**60, 2**60) + packed(address=ADDRESS)])
        send([head(PROBE, 0, 2**60, 5) + packed(-3, [None, "x", 2**60, -1], address=ADDRESS)])
        send(tell(5, Note(5), base=2**60, address=ADDRESS))
        await until(lambda: b.counters["duplicates"] == 2)
        # The last number there is: what is answered still fits into a head.
        send(tell(2**60, Note(6), base=2**60, address=ADDRESS))

    run(under_attack(sockets, attack))


def test_a_sender_that_invents_names_cannot_fill_the_memory(sockets):
    async def attack(send, b):
        for i in range(6000):
            address = ["run", 0, f"stranger-{i}", "x", 1, "ipc:///nowhere"]
            send([head(TELL, 0, 1, 1) + packed(*msgpack.unpackb(encode(Note(i))[0][4:]), address=address)])
            if i % 100 == 0:
                await asyncio.sleep(0)
        await until(lambda: b.counters["received"] > 6000)
        assert len(b._inlets) <= b.bounds.peers

    run(under_attack(sockets, attack))


@contextlib.contextmanager
def raw_socket(endpoint: str) -> Iterator[zmq.Socket]:
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.sndhwm = raw.linger = 0
    raw.connect(endpoint)
    try:
        yield raw
    finally:
        raw.close()


def test_a_sender_of_garbage_is_cut_off_and_named_once(sockets):
    async def work():
        a, b = mailbox("a", f"ipc://{sockets}/a"), mailbox("b", "tcp://127.0.0.1:0", bounds=Bounds(offences=5))
        got = []

        async def keep(message, sender):
            got.append(sender.name)

        b.on(Note, keep)
        with structlog.testing.capture_logs() as logs:
            async with opened(a, b):
                with raw_socket(b.endpoint) as raw, raw_socket(b.endpoint) as again:
                    raw.send_multipart(tell(1, Note(1), address=ADDRESS))
                    for _ in range(100):
                        raw.send(b"garbage")
                    raw.send_multipart(tell(2, Note(2), address=ADDRESS))
                    await until(lambda: b.counters["cut_off"] == 96)
                    assert (b.counters["refused"], b.counters["cut_off_senders"]) == (5, 1)
                    await a.tell(b.endpoint, Note(3), 10.0)
                    # A new connection is a new chance, until it offends too.
                    again.send_multipart(tell(1, Note(1), address=[*ADDRESS[:2], "again", *ADDRESS[3:]]))
                    await until(lambda: len(got) == 3)
                    assert got == ["stranger", "a", "again"]
        (told,) = [r for r in logs if r["event"] == "sender_cut_off"]
        assert told["origin"] == "127.0.0.1" and "routing id" in told["sender"]

    run(work())


def test_a_frame_far_over_the_limit_costs_its_sender_the_connection(sockets):
    async def work():
        b = mailbox("b", f"ipc://{sockets}/b", bounds=Bounds(limits=LIMITS))
        got = []

        async def keep(message, sender):
            got.append(sender.name)

        b.on(Note, keep)
        async with opened(b):
            with raw_socket(b.endpoint) as raw:
                lost = raw.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                for i in range(3):
                    raw.send(bytes(400_000))
                    await until(lambda: lost.poll(0))
                    lost.recv_multipart()
                    raw.send_multipart(tell(1, Note(1), address=[*ADDRESS[:2], f"after-{i}", *ADDRESS[3:]]))
                    await until(lambda n=i: len(got) == n + 1)
                raw.disable_monitor()
                lost.close()
            assert b.counters["refused"] == 0 and not b.failed.done()

    run(work())


def test_late_messages_of_a_link_given_up_are_no_offence(sockets):
    async def attack(send, b):
        send(tell(1, Note(1), address=[*ADDRESS[:4], 7, ADDRESS[5]]))
        for _ in range(50):
            send(tell(1, Note(1), address=ADDRESS))
        await until(lambda: b.counters["refused_stale"] == 50)
        assert not b._offences

    run(under_attack(sockets, attack))


def test_a_header_cannot_become_many_times_its_size(sockets):
    flat, deep = b"\xdd" + (2**21).to_bytes(4, "big") + b"\x90" * 2**21, b"\x92\x90" * 2**21 + b"\x90"
    wide = b"\xdc\xff\xff" + (b"\xdc\x00\xff" + b"\x01" * 255) * 65_535
    limits = Limits(header_bytes=2**24)
    for values in (flat, deep, wide):
        with pytest.raises(Refused, match="no msgpack header"):
            parse([head(TELL, 0, 1, 1) + values], limits)
    rows = [msgpack.packb([*ADDRESS, "note", 1, [b"x" * 2**22] * 3])]
    assert len(parse([head(TELL, 0, 1, 1) + rows[0]], limits).rest) == 3


def test_strangers_cannot_push_members_out(sockets):
    async def work():
        a, b = mailbox("a", f"ipc://{sockets}/a"), mailbox("b", f"ipc://{sockets}/b")
        answered = []

        async def answer(message, sender):
            answered.append(sender.name)
            return Reply(1)

        b.on(Question, answer, strangers=True)
        async with opened(a, b):
            await a.ask(b.endpoint, Question(1), 10.0)
            with raw_socket(b.endpoint) as raw:
                for i in range(6000):
                    address = ["", 0, f"stranger-{i}", "x", 1, "ipc:///nowhere"]
                    question = msgpack.unpackb(encode(Question(i))[0][4:])
                    raw.send(head(ASK, 0, 1, 1) + packed(*question, address=address))
                    if i % 100 == 0:
                        await asyncio.sleep(0)
                await until(lambda: sum(b.counters[c] for c in ("received", "deferred", "refused_peers")) == 6001)
            assert len(answered) > 100
            assert len(b._strangers) <= b.bounds.strangers and [k[1] for k in b._inlets] == ["a"]

    run(work())


@pytest.mark.parametrize("rounds", [2000, pytest.param(100_000, marks=pytest.mark.long)])
def test_mutated_messages_crash_nothing(sockets, rounds):
    draw = random.Random(7)
    seeds = [
        tell(1, Tensor(1, np.arange(20_000, dtype=np.int64))),
        tell(1, Note(3, "text")),
        [head(ASK, 0, 1, 1) + packed(*msgpack.unpackb(encode(Question(1))[0][4:]))],
        [head(PROBE, 0, 4, 1) + packed(1, [1, 2])],
        [head(SETTLED, 0, 1, 2) + packed()],
    ]

    async def attack(send, b):
        for i in range(rounds):
            frames = [bytearray(f) for f in draw.choice(seeds)]
            victim = frames[0] if draw.random() < 0.8 else draw.choice(frames)
            for _ in range(draw.randint(1, 4)):
                at = draw.randrange(len(victim))
                victim[at : at + draw.randint(0, 2)] = draw.randbytes(draw.randint(0, 3))
                if not victim:
                    break
            if draw.random() < 0.1:
                frames = [*frames[: draw.randint(1, len(frames))], bytearray(draw.randbytes(9))]
            send([bytes(f) for f in frames])
            if i % 50 == 0:
                await asyncio.sleep(0.001)

    b = run(under_attack(sockets, attack), seconds=280)
    assert b.counters["refused"] > rounds / 2
