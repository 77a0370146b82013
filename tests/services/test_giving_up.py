"""A run that cannot go on says so: groups that nobody can use, a service that was started twice, goodbyes unheard."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_version import FakeDraws, controller

from relax.ledger.states import State
from relax.protocol.messages import Filtered, Lease, Member, Ready, Register
from relax.services.controller import ALIVE_SECONDS, FILTERED_BATCHES, Controller
from relax.services.service import ServiceError, shared_options


def issue(it: Controller, group: int) -> Lease:
    it.book.draw(group, group, 0)
    lease = it.book.issue(group, "rollout-0", 0)
    it.gate.issue(group, 0)
    return lease


def controller_of(tmp_path: Path) -> Controller:
    it = controller(tmp_path, max_staleness=2, rollout_lead=2, use_tis=True)
    it.draws = FakeDraws(SimpleNamespace(prompt_id=1, epoch=0))  # type: ignore[assignment]
    return it


def test_groups_that_are_all_filtered_end_the_run_with_the_reason(tmp_path: Path) -> None:
    it = controller_of(tmp_path)

    async def filter_all() -> None:
        for group in range(1, 100):
            await it.on_filtered(Filtered(issue(it, group), "too_few_rewards"), None)

    with pytest.raises(ServiceError, match=f"{FILTERED_BATCHES} groups in a row.*too_few_rewards"):
        asyncio.run(filter_all())


def test_one_usable_group_between_them_lets_the_run_go_on(tmp_path: Path) -> None:
    it = controller_of(tmp_path)

    async def filter_most() -> None:
        for group in range(1, FILTERED_BATCHES):
            await it.on_filtered(Filtered(issue(it, group), "too_few_rewards"), None)
        good = issue(it, FILTERED_BATCHES)
        it.book.advance(good, State.SAMPLED, oldest=0, tokens=1)
        await it.on_ready(Ready(good, 0, 1), SimpleNamespace(name="advantages"))
        await it.on_filtered(Filtered(issue(it, FILTERED_BATCHES + 1), "too_few_rewards"), None)

    asyncio.run(filter_most())


def register(it: Controller, incarnation: str) -> Any:
    member = Member("rollout-0", "rollout", f"inproc://{incarnation}", incarnation)
    return it.on_register(Register(member, "", 7, shared_options(it.options)), None)


@pytest.mark.parametrize(
    ("silent", "told"),
    [(0.0, "rollout-0 runs already"), (ALIVE_SECONDS + 1, "rollout-0 .* died")],
    ids=["alive", "dead"],
)
def test_a_name_belongs_to_one_process_of_a_run(tmp_path: Path, silent: float, told: str) -> None:
    it = controller_of(tmp_path)
    it.registry.entries["rollout-0"].heard = time.monotonic() - silent

    async def second_life() -> int | None:
        it._open_for_members.set()
        it._ended = asyncio.get_running_loop().create_future()
        with pytest.raises(ServiceError, match=told):
            await register(it, "2")
        return it._ended.result() if it._ended.done() else None

    assert asyncio.run(second_life()) == (None if silent == 0.0 else 1)
    assert it.registry.entries["rollout-0"].member.incarnation == "1"
