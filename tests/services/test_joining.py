"""A service joins: what it knows of the others is what the controller said last, whatever was lost on the way."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from desk import Desk, desk

from relax.config.options import Options
from relax.protocol.envelope import HEAD, MAGIC, REPLY
from relax.protocol.faults import Faults
from relax.protocol.mailbox import Mailbox
from relax.protocol.messages import Heartbeat, Member, Members, Register
from relax.services.service import Service, shared_options

PATIENCE = 20.0


class RepliesLost(Faults):
    """Loses every reply while `lose` is set."""

    def __init__(self) -> None:
        super().__init__(0)
        self.lose = True

    def send(self, frames: list[Any], send: Any) -> bool:
        first = next(bytes(frame) for frame in frames if bytes(frame[: len(MAGIC)]) == MAGIC)
        if self.lose and HEAD.unpack_from(first)[1] == REPLY:
            self.injected += 1
            return True
        return send(frames)


def mailbox(name: str, **more: Any) -> Mailbox:
    return Mailbox(name, run_id="r", lineage=0, incarnation=f"{name}.1", bind=f"inproc://joining-{name}", **more)


async def until(fact: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not fact():  # noqa: ASYNC110  (a plain fact)
            await asyncio.sleep(0.01)


async def controller(folder: Path, faults: Faults) -> Desk:
    """A desk that is reached by mailbox, and tells by it who is reached so."""
    it = desk(folder)
    it.mailbox = mailbox("controller", faults=faults)
    it.mailbox.on(Register, it.on_register)
    it.mailbox.on(Heartbeat, it.on_heartbeat)
    it._open_for_members.set()

    def send(endpoint: str, message: Any) -> None:
        if endpoint.startswith("inproc://joining"):
            it.mailbox.tell_nowait(endpoint, message)

    it.send = send  # type: ignore[method-assign]
    await it.mailbox.start()
    return it


async def newcomer(name: str, options: Options, endpoint: str) -> Service:
    """A service that has a mailbox and is about to join."""
    run: Any = SimpleNamespace(run_id="r")
    context: Any = SimpleNamespace(name=name, options=options, run=run, node="", controller=endpoint, lineage=0)
    it = Service(context)
    it.role = "rollout"  # type: ignore[misc]
    it.mailbox = mailbox(name)
    it._ended = asyncio.get_running_loop().create_future()
    it.mailbox.on(Members, it._on_members)
    await it.mailbox.start()
    return it


def test_who_joined_while_the_answer_to_a_newcomer_was_lost_is_known_to_it(tmp_path: Path) -> None:
    async def work() -> None:
        faults = RepliesLost()
        hub = await controller(tmp_path, faults)
        it = await newcomer("rollout-7", hub.options, hub.mailbox.endpoint)
        joining = asyncio.create_task(it.join())
        await until(lambda: "rollout-7" in hub.registry.entries and faults.injected)
        late = Member("reward-7", "reward", "inproc://nobody", "reward-7.1")
        await hub.on_register(Register(late, "", 7, shared_options(hub.options)), None)
        await until(lambda: "reward-7" in it.members)
        faults.lose = False
        await asyncio.wait_for(joining, PATIENCE)
        assert set(it.members) == set(hub.registry.entries)
        assert late in it.of_role("reward") and late.endpoint not in it._gone
        for task in it._tasks:
            task.cancel()
        it.mailbox.abort()
        hub.mailbox.abort()

    asyncio.run(asyncio.wait_for(work(), 2 * PATIENCE))


def test_a_new_life_at_the_endpoint_of_an_old_one_is_told(tmp_path: Path) -> None:
    async def work() -> None:
        it = await newcomer("rollout-8", Options(), "inproc://controller")
        first, second = (Member("reward-0", "reward", "tcp://127.0.0.1:9", life) for life in "12")
        it.learn((first,))
        it.learn(())
        assert first.endpoint in it._gone
        it.learn((second,))
        assert second.endpoint not in it._gone
        it.mailbox.abort()

    asyncio.run(asyncio.wait_for(work(), PATIENCE))
