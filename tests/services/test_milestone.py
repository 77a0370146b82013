"""A count that rises and those who wait for it."""

import asyncio

import pytest

from relax.services.milestone import Milestone


def test_those_who_wait_go_on_when_their_value_is_reached_or_passed() -> None:
    async def life() -> list[str]:
        milestone, order = Milestone(), []

        async def wait(value: int, name: str) -> None:
            await milestone.wait(value, deadline=5)
            order.append(name)

        waiting = [asyncio.create_task(wait(2, "two")), asyncio.create_task(wait(0, "zero"))]
        await asyncio.sleep(0)
        milestone.reach(0)
        await asyncio.sleep(0.01)
        assert order == ["zero"]
        milestone.reach(5)
        await asyncio.gather(*waiting)
        await milestone.wait(1, deadline=0)
        return order

    assert asyncio.run(life()) == ["zero", "two"]


def test_waiting_ends_at_the_deadline() -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(Milestone().wait(0, deadline=0.01))


def test_it_only_rises() -> None:
    async def life() -> None:
        milestone = Milestone()
        milestone.reach(3)
        for value in (2, 3):
            with pytest.raises(ValueError, match="only rises"):
                milestone.reach(value)

    asyncio.run(life())
