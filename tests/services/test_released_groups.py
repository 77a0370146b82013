"""Advantages lets go of a draw that ends while it is still fetched or filtered here, and says nothing more of it."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relax.config.options import Options
from relax.protocol.messages import Filtered, GroupOrder, Lease, Ready, Release, Scored
from relax.protocol.payload import Payload
from relax.protocol.tensors import FINISH_STOP, SampledGroup
from relax.services import advantages
from relax.services.advantages import Advantages
from relax.services.service import Context

SAMPLED = SampledGroup(
    response_tokens=np.zeros(2, np.int32),
    response_lens=np.ones(2, np.int32),
    behaviour_logprobs=np.zeros(2, np.float32),
    finish=np.full(2, FINISH_STOP, np.uint8),
    runs=np.array([[0, 3, 1], [1, 3, 1]], np.int64),
)
NOBODY: Any = None


def lease(fence: int) -> Lease:
    return Lease(7, 0, 0, fence)


def scored(fence: int, rewards: tuple[float, float] = (0.0, 1.0)) -> Scored:
    order = GroupOrder(lease(fence), 7, 0, np.zeros(3, np.int32), b"{}")
    return Scored(order, Payload.inline({}), np.array(rewards))


class Held:
    """An advantages service whose fetches and filters each wait for `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
        options, run = Options(n_samples_per_prompt=2), SimpleNamespace(run_id="r")
        self.service = Advantages(Context("advantages-0", options, run, "", "", None, options))  # type: ignore[arg-type]
        self.service._ended = asyncio.get_running_loop().create_future()
        self.service.payloads = NOBODY  # what is fetched is `SAMPLED`
        self.told: list[Any] = []
        self.go_on = asyncio.Event()
        monkeypatch.setattr(self.service, "report", self.told.append)
        unwanted = self.service._unwanted

        async def fetch(*args: Any) -> SampledGroup:
            if slow == "fetch":
                await self.go_on.wait()
            return SAMPLED

        async def weigh(*args: Any) -> str | None:
            if slow == "filter":
                await self.go_on.wait()
            return await unwanted(*args)

        monkeypatch.setattr(advantages, "take_group", fetch)
        monkeypatch.setattr(self.service, "_unwanted", weigh)

    async def scene(self, *steps: Any) -> None:
        """Takes the messages one after the other, then lets everything go on."""
        for message in steps:
            take: Callable[..., Any] = (
                self.service.on_scored if isinstance(message, Scored) else self.service.on_release
            )
            await take(message, NOBODY)
            await asyncio.sleep(0.001)
        self.go_on.set()
        await asyncio.gather(*self.service._tasks)
        assert not self.service._ended.done(), "it failed"


slow = pytest.mark.parametrize("slow", ["fetch", "filter"])


@slow
def test_a_draw_released_on_its_way_is_not_kept(monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    async def run() -> None:
        it = Held(monkeypatch, slow)
        await it.scene(scored(1), Release((lease(1),)))
        assert not it.service.groups and not it.told and list(it.service.holds()) == []

    asyncio.run(run())


@slow
def test_a_draw_released_on_its_way_is_not_counted(monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    async def run() -> None:
        it = Held(monkeypatch, slow)
        await it.scene(scored(1, (np.nan, np.nan)), Release((lease(1),)))
        assert not it.told and it.service._incomplete == 0
        await it.scene(scored(2, (np.nan, np.nan)))
        assert [type(m) for m in it.told] == [Filtered] and it.service._incomplete == 1

    asyncio.run(run())


@slow
@pytest.mark.parametrize("released", [0, 1])
def test_the_end_of_an_older_draw_is_not_that_of_a_newer_one(
    monkeypatch: pytest.MonkeyPatch, slow: str, released: int
) -> None:
    async def run() -> None:
        it = Held(monkeypatch, slow)
        await it.scene(scored(2), Release((lease(released),)), scored(1))
        assert it.told == [Ready(lease(2), 3, 2)]
        assert [group.order.lease for group in it.service.groups.values()] == [lease(2)]
        await it.scene(scored(1))
        assert it.told == [Ready(lease(2), 3, 2)], "late, and of the older draw"

    asyncio.run(run())
