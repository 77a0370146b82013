"""A request that the engine refuses costs its own group and no other of the same message."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relax.config.options import Options
from relax.engines.base import Request, RequestRefused, Result
from relax.protocol.messages import Generate, GroupOrder, Lease, Rejected
from relax.services import rollout
from relax.services.rollout import Rollout
from relax.services.service import Context

LONGEST = 4


class Picky:
    """Takes all requests of a call or none; refuses prompts above LONGEST tokens, one at a time."""

    def __init__(self) -> None:
        self.taken: list[list[str]] = []

    async def submit(self, requests: Sequence[Request], *, together: bool = False) -> list[asyncio.Future[Result]]:
        for request in requests:
            if len(request.prompt) > LONGEST:
                raise RequestRefused(request.id, f"request {request.id} is too long")
        self.taken.append([request.id for request in requests])
        return [asyncio.get_running_loop().create_future() for _ in requests]


def order(group: int, tokens: int) -> GroupOrder:
    return GroupOrder(Lease(group, 0, 0, 1), group, 0, np.zeros(tokens, np.int32), b"{}")


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("long", [{1}, {0, 2}, {0, 1, 2}])
def test_the_refused_groups_alone_are_rejected(monkeypatch: pytest.MonkeyPatch, long: set[int], together: bool) -> None:
    engine, told = Picky(), []
    monkeypatch.setattr(rollout, "make_engine", lambda *args: engine)

    async def scenario() -> None:
        options, run = Options(n_samples_per_prompt=2), SimpleNamespace(run_id="r")
        replica = Rollout(Context("rollout-0", options, run, "", "", None, options))  # type: ignore[arg-type]
        monkeypatch.setattr(replica, "report", told.append)
        replica._admission.set()
        orders = tuple(order(group, LONGEST + (group in long)) for group in range(3))
        sender: Any = None
        await replica.on_generate(Generate(orders, together), sender)
        await asyncio.sleep(0.01)
        assert set(replica.draws.running) == {0, 1, 2} - long and not replica.draws.queued
        for task in replica._tasks:
            task.cancel()

    asyncio.run(scenario())
    assert {(type(m), m.lease.group, m.reason) for m in told} == {(Rejected, group, "refused") for group in long}
    good = [f"{group}.1.{i}" for group in sorted({0, 1, 2} - long) for i in (0, 1)]
    assert engine.taken == ([good] if good else [])
