"""A peer that dies or is silent: what waits for it goes on, and what has no other place to go ends."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relax.config.options import Options
from relax.protocol.errors import PeerForgotten
from relax.protocol.mailbox import Mailbox
from relax.protocol.messages import Chunk, FetchChunk, Lease, Member, Release, TrainBatch, Withdraw
from relax.protocol.payload import Payload, PayloadStore
from relax.services.service import Service
from relax.services.trainer import Trainer

COUNT = iter(range(1000))
PATIENCE = 20.0


def mailbox(name: str, life: int = 1) -> Mailbox:
    bind = f"inproc://peers-{next(COUNT)}-{name}"
    return Mailbox(name, run_id="r", lineage=0, incarnation=f"{name}.{life}", bind=bind)


def member(box: Mailbox, role: str) -> Member:
    return Member(box.name, role, box.endpoint, box.incarnation)


async def service(cls: type[Service], peer_timeout: float = 0.3) -> Any:
    """A service with a mailbox and without a life."""
    options = Options(peer_timeout=peer_timeout)
    run: Any = SimpleNamespace(run_id="r")
    it = cls(SimpleNamespace(name="it", options=options, run=run, controller="inproc://controller", lineage=0))  # type: ignore
    it.mailbox = mailbox("it")
    it._ended = asyncio.get_running_loop().create_future()
    await it.mailbox.start()
    for kind, handler in (it.handlers() if cls is not Service else {}).items():
        it.mailbox.on(kind, handler)
    return it


def play(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE))


def test_a_tell_to_a_silent_peer_waits_until_it_is_no_member() -> None:
    async def work() -> None:
        it = await service(Service)
        it.learn((Member("rollout-0", "rollout", "inproc://nobody", "1"),))
        told = asyncio.ensure_future(it.tell("inproc://nobody", Release(())))
        await asyncio.sleep(1.0)
        assert not told.done() and it.counters["wait/silent_peer"] >= 0.6
        it.learn(())
        await told
        await it.tell("inproc://nobody", Release(()))  # it stays gone
        assert not it._ended.done()
        it.mailbox.abort()

    play(work())


def test_a_peer_that_was_never_heard_of_is_given_up_after_the_deadline() -> None:
    async def work() -> None:
        it = await service(Service)
        started = time.monotonic()
        with pytest.raises(PeerForgotten):
            await it.ask("inproc://nobody", FetchChunk(0, "x"))
        assert 0.2 < time.monotonic() - started < PATIENCE
        it.mailbox.abort()

    play(work())


def test_what_was_asked_of_a_life_that_ended_is_asked_of_the_next() -> None:
    async def work() -> None:
        it, first, second = await service(Service), mailbox("actor"), mailbox("actor", 2)
        asked = asyncio.Event()

        async def never(message: FetchChunk, sender: Any) -> Chunk:
            asked.set()
            await asyncio.sleep(PATIENCE)
            raise AssertionError

        async def answer(message: FetchChunk, sender: Any) -> Chunk:
            return Chunk(np.arange(3, dtype=np.uint8))

        first.on(FetchChunk, never)
        second.on(FetchChunk, answer)
        await first.start()
        await second.start()
        it.learn((member(first, "actor"),))
        reply = asyncio.ensure_future(it.ask_role("actor", FetchChunk(0, "x")))
        await asked.wait()
        it.learn(())
        await asyncio.sleep(0.1)
        assert not reply.done()
        it.learn((member(second, "actor"),))
        assert (await reply).data.tolist() == [0, 1, 2]
        for box in (it.mailbox, first, second):
            box.abort()

    play(work())


# --- batches that are handed over ------------------------------------------------------------------------------------


def batch(payload: Payload, number: int = 0, commit: int = 0) -> TrainBatch:
    return TrainBatch(number, commit, (Lease(7, 0, 0, 1),), payload)


def test_a_batch_whose_tensors_died_is_forgotten_and_refused_should_it_still_come() -> None:
    async def work() -> None:
        it, advantages = await service(Trainer), mailbox("advantages")
        await advantages.start()
        gone = Payload("batch 0", {"x": ("<f4", (3,))}, None, "inproc://nobody")
        it.learn((Member("advantages", "advantages", "inproc://nobody", "1"),))
        await it.on_train_batch(batch(gone), None)
        assert list(it.holds()) == [Lease(7, 0, 0, 1)]
        it.learn(())
        await asyncio.sleep(0.1)
        assert not (await it.on_withdraw(Withdraw(0, 0), None)).held
        assert list(it.holds()) == []
        await it.on_train_batch(batch(gone), None)
        assert list(it.holds()) == [] and it.batches.empty(), "it came late"
        it.mailbox.abort()
        advantages.abort()

    play(work())


def test_a_batch_that_is_here_as_a_whole_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax.services.trainer.TrainTensors.from_arrays", lambda arrays, where: arrays)

    async def work() -> None:
        it, advantages = await service(Trainer), mailbox("advantages")
        await advantages.start()
        store = PayloadStore(advantages, inline_limit=0)
        it.learn((member(advantages, "advantages"),))
        await it.on_train_batch(batch(store.put("batch 0", {"x": np.zeros(3, np.float32)}), commit=4), None)
        taken = await it.batches.get()
        advantages.abort()
        it.learn(())
        assert (await it.on_withdraw(Withdraw(0, 4), None)).held
        assert taken.message.commit == 4 and taken.tensors["x"].shape == (3,)
        it.mailbox.abort()

    play(work())
