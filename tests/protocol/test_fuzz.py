"""Every kind of mailbox under a stream of mutated messages: nothing falls over, and everybody else is served."""

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from relax.protocol.codec import encode
from relax.protocol.core import Bounds
from relax.protocol.envelope import ACK, ASK, ERROR, HEAD, NOTHING, PROBE, REFUSED, REPLY, SETTLED, TELL, head
from relax.protocol.errors import ProtocolError
from relax.protocol.frames import Limits
from relax.protocol.mailbox import Mailbox
from relax.protocol.messages import Hello
from tests.protocol.conftest import mailbox, opened, run, until
from tests.protocol.recorded import ROLES, everything, kinds_of
from tests.protocol.wire import Note, Question, Reply

LIMITS = Limits(header_bytes=2**20, frame_bytes=2**20, message_bytes=2**22, frames=16)
BURST = 20
EXTREMES: tuple[Any, ...] = (
    0,
    -1,
    2**63,
    2**64 - 1,
    -(2**63),
    None,
    True,
    "",
    "x" * 500,
    b"",
    1e308,
    float("nan"),
    [],
    {},
)


class Fuzzer:
    """Frames that begin as what a mailbox sends and end as anything, the same for a seed."""

    def __init__(self, seed: int, messages: list[Any]) -> None:
        self.draw = random.Random(seed)
        self.link = 0
        self.sent: list[list[bytes]] = []
        self.bodies = []
        for message in messages:
            first, *large = encode(message)
            length = int.from_bytes(first[:4], "little")
            padding = -(4 + length) % 8
            self.bodies.append((first[4 : 4 + length], first[4 + length + padding :], [bytes(f) for f in large]))

    def next(self) -> list[bytes]:
        draw = self.draw
        if self.sent and draw.random() < 0.05:
            return draw.choice(self.sent)  # a replay
        act = draw.choices((TELL, ASK, PROBE, SETTLED, draw.randint(0, 255)), (5, 3, 1, 1, 1))[0]
        frames = self._mutated(self.valid(act))
        if len(self.sent) < 200:
            self.sent.append(frames)
        return frames

    def valid(self, act: int) -> list[bytes]:
        """What the mailbox would take: each message opens a link of its own, so that its number is the next."""
        self.link += 1
        header, small, large = self.draw.choice(self.bodies)
        address = ["run", 0, f"sender-{self.draw.randrange(30)}", "a1", self.link, "ipc:///nowhere"]
        rest = {PROBE: [1, [1, 2]], SETTLED: []}.get(act, msgpack.unpackb(header))
        if act in (PROBE, SETTLED):
            small, large = b"", []
        return [self._first(act, 1, [*address, *rest], small), *large]

    def _first(self, act: int, number: int, values: list, small: bytes) -> bytes:
        packed = msgpack.packb(values)
        padding = bytes(-(HEAD.size + len(packed)) % 8) if small else b""
        return head(act, self.draw.randint(0, 1), number, 1, packed) + packed + padding + small

    def _mutated(self, frames: list[bytes]) -> list[bytes]:
        draw = self.draw
        for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
            frames = draw.choice((self._bits, self._cut, self._head, self._structure, self._structure, self._frames))(
                frames
            )
        return frames

    def _bits(self, frames: list[bytes]) -> list[bytes]:
        at = self.draw.randrange(len(frames))
        frame = bytearray(frames[at])
        for _ in range(self.draw.randint(1, 8) if frame else 0):
            frame[self.draw.randrange(min(len(frame), 400))] ^= 1 << self.draw.randrange(8)
        return [*frames[:at], bytes(frame), *frames[at + 1 :]]

    def _cut(self, frames: list[bytes]) -> list[bytes]:
        at = self.draw.randrange(len(frames))
        frame = frames[at]
        if self.draw.random() < 0.5:
            frame = frame[: self.draw.randint(0, len(frame))]
        else:
            frame += self.draw.randbytes(self.draw.choice((1, 9, 5000)))
        return [*frames[:at], frame, *frames[at + 1 :]]

    def _head(self, frames: list[bytes]) -> list[bytes]:
        """Lengths, numbers and acts that are not so."""
        if len(frames[0]) < HEAD.size:
            return frames
        fields = list(HEAD.unpack_from(frames[0]))
        at = self.draw.randint(1, 5)
        limit = (0, 255, 255, 2**32 - 1, 2**64 - 1, 2**64 - 1)[at]
        fields[at] = min(limit, self.draw.choice((0, 1, 2, 200, limit, limit // 2, self.draw.randint(0, limit))))
        return [HEAD.pack(*fields) + frames[0][HEAD.size :], *frames[1:]]

    def _structure(self, frames: list[bytes]) -> list[bytes]:
        """A value somewhere in the header becomes another type, extreme, huge or deep."""
        draw = self.draw
        try:
            _, act, _, length, number, _ = HEAD.unpack_from(frames[0])
            values = msgpack.unpackb(frames[0][HEAD.size : HEAD.size + length])
        except Exception:
            return frames  # an earlier mutation broke it already
        place, at = values, 0
        while isinstance(place, list | dict) and place:
            at = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
            if not isinstance(place[at], list | dict) or not place[at] or draw.random() < 0.2:
                break
            place = place[at]
        if not isinstance(place, list | dict) or not place:
            return frames
        deep: list = []
        for _ in range(draw.choice((3, 40, 900))):
            deep = [deep]
        shape = [
            "f8",
            draw.choice(([2**40], [2**62, 2**62], [0, 2**60], [1] * 40, [-1], [2**31, 0])),
            draw.choice((None, 0, 8)),
        ]
        place[at] = draw.choice((*EXTREMES, shape, deep, [1] * 5000, msgpack.ExtType(1, b"x")))
        return [self._first(act, min(number, 2**64 - 1), values, b""), *frames[1:]]

    def _frames(self, frames: list[bytes]) -> list[bytes]:
        draw, other = self.draw, self.valid(TELL)
        return draw.choice(
            (
                [*frames, *other],
                [frames[0], *other[1:]],
                frames[::-1],
                frames[:1],
                [*frames, *[b""] * 30],
                [frames[0], *[draw.randbytes(40_000) for _ in range(draw.randint(1, 3))]],
                [bytes(draw.choice((0, 10, 10, 10, 2**20 + 2**17)))],
            )
        )


@contextlib.contextmanager
def raw(kind: int) -> Iterator[zmq.Socket]:
    socket = zmq.Context.instance().socket(kind)
    socket.sndhwm = socket.linger = 0
    try:
        yield socket
    finally:
        socket.close()


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def serve(role: str, endpoint: str, handled: Counter[str]) -> Mailbox:
    """The mailbox of a role, its handlers replaced by ones that count."""
    served = mailbox(role, endpoint, bounds=Bounds(limits=LIMITS, peers=64, offences=2**30))

    async def count(message: Any, sender: Any) -> None:
        handled[type(message).__name__] += 1

    async def answer(message: Question, sender: Any) -> Reply:
        return Reply(message.number)

    for kind in kinds_of(role):
        served.on(kind, count, strangers=kind is Hello)
    served.on(Question, answer)
    served.on(Note, count)
    return served


async def attack(served: Mailbox, good: Mailbox, fuzzer: Fuzzer, rounds: int) -> list[int]:
    """Send `rounds` mutated messages while `good` goes on talking; RSS after each quarter."""
    sizes, mark = [], msgpack.unpackb(encode(Note(-1))[0][4:])

    async def talk() -> int:
        number = 0
        while True:
            assert await good.ask(served.endpoint, Question(number), 20.0) == Reply(number)
            await good.tell(served.endpoint, Note(number), 20.0)
            number += 1
            await asyncio.sleep(0.001)

    with raw(zmq.DEALER) as socket:
        socket.connect(served.endpoint)
        talking = asyncio.create_task(talk())
        try:
            for i in range(rounds):
                socket.send_multipart(fuzzer.next(), zmq.NOBLOCK)
                if i % BURST == BURST - 1:
                    while socket.poll(0):
                        socket.recv_multipart()
                    await asyncio.sleep(0.0005)
                    assert not talking.done(), talking.exception()
                if i % (rounds // 4) == rounds // 4 - 1:
                    # A connection keeps its order: when this arrives, all before it was read and waits in no buffer.
                    name = f"mark-{fuzzer.link}-{i}"
                    packed = msgpack.packb(["run", 0, name, "a1", 1, "ipc:///x", *mark])
                    socket.send(head(TELL, 0, 1, 1, packed) + packed)
                    await until(lambda name=name: ("run", name, "a1") in served._inlets)
                    sizes.append(rss())
            assert await good.ask(served.endpoint, Question(7), 20.0) == Reply(7)
        finally:
            talking.cancel()
            await asyncio.gather(talking, return_exceptions=True)
    return sizes


@pytest.mark.parametrize("rounds", [2_000, pytest.param(100_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("role", ROLES)
def test_mutated_messages_leave_a_mailbox_as_it_was(sockets, role, rounds):
    fuzzer = Fuzzer(ROLES.index(role), everything(kinds_of(role), random.Random(1)))
    handled: Counter[str] = Counter()
    surprises: list[dict] = []

    async def work():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: surprises.append(context))
        served, good = serve(role, f"ipc://{sockets}/b", handled), mailbox("good", f"ipc://{sockets}/good")
        async with opened(served, good):
            # Buffers, senders and arenas reach their size.
            await attack(served, good, fuzzer, max(500, rounds // 10))
            sizes = await attack(served, good, fuzzer, rounds)
            assert not served.failed.done() and not good.failed.done()
            assert len(served._inlets) <= served.bounds.peers
            await good.close()
            return served.counters, sizes

    counters, sizes = run(work(), seconds=60 + rounds / 100)
    assert not surprises
    assert counters["refused"] > rounds / 3, counters
    assert handled.keys() >= {kind.__name__ for kind in kinds_of(role)}, handled  # what was left whole was taken
    # Over the second half: allocators, and the fuzzer in the same process, take a while to have seen every size.
    assert sizes[-1] <= 1.05 * sizes[1], sizes


@pytest.mark.parametrize("rounds", [2_000, pytest.param(20_000, marks=pytest.mark.long)])
def test_mutated_answers_reach_nobody(sockets, rounds):
    """The other way: an endpoint that answers whatever it likes, at a mailbox that goes on talking to others."""
    draw = random.Random(3)
    fuzzer = Fuzzer(4, [Reply(1), Note(1)])
    surprises: list[dict] = []
    endpoint = f"ipc://{sockets}/evil"

    async def answer(message, sender):
        return Reply(message.number)

    def forged(link: int) -> list[bytes]:
        act = draw.choice((ACK, REPLY, NOTHING, ERROR, REFUSED, TELL))
        body = msgpack.unpackb(fuzzer.bodies[0][0])
        rest = {
            ACK: [draw.choice((0, 1, None, "x")), draw.choice(([], [1, 2], [[]], ["x", None], 5))],
            REPLY: body,
            ERROR: [draw.choice(("no", 5, ["x"], "y" * 100_000))],
            REFUSED: ["never"],
        }.get(act, [])
        values = ["run", 0, "evil", "a1", link, endpoint, *rest]
        packed = msgpack.packb(values)
        number, base = draw.choice((0, 1, 2, 3, 2**40)), draw.choice((0, 1, ASK, 2**40))
        frames = [head(act, draw.randint(0, 1), number, base, packed) + packed]
        return fuzzer._mutated(frames) if draw.random() < 0.7 else frames

    async def work():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: surprises.append(context))
        a, b = mailbox("a", f"ipc://{sockets}/a"), mailbox("b", f"ipc://{sockets}/b")
        b.on(Question, answer)
        with raw(zmq.ROUTER) as evil:
            evil.bind(endpoint)
            async with opened(a, b):
                for i in range(rounds // 20):
                    asked = asyncio.create_task(a.ask(endpoint, Question(i), 5.0))
                    with contextlib.suppress(ProtocolError):
                        a.tell_nowait(endpoint, Note(i))
                    await until(lambda: evil.poll(0))
                    while evil.poll(0):
                        route = evil.recv_multipart()[0]
                    link = a._links[endpoint].number
                    for _ in range(20):
                        evil.send_multipart([route, *forged(link)])
                    await asyncio.sleep(0.002)
                    asked.cancel()
                    await asyncio.gather(asked, return_exceptions=True)
                    if i % 10 == 0:
                        assert await a.ask(b.endpoint, Question(i), 10.0) == Reply(i)
                assert not a.failed.done()
                return a.counters

    counters = run(work(), seconds=60 + rounds / 50)
    assert not surprises, surprises[0]
    assert counters["refused"] > rounds / 4, counters
