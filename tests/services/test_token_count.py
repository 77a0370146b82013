"""What counts as getting on at a rollout replica: every token, also of a sample that is far from its end."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from relax.config.options import Options
from relax.engines.base import BadResult, Request, Result
from relax.protocol.messages import Generate, GroupOrder, Lease
from relax.services import rollout
from relax.services.rollout import Rollout
from relax.services.service import Context
from relax.services.token_count import TokenCount
from relax.services.watchdog import Watchdog


def test_tokens_are_counted_once_whoever_tells_of_them_first() -> None:
    count = TokenCount()
    assert count.sees({"a": 3, "b": 0}) and count.total == 3
    assert not count.sees({"a": 3, "b": 0})
    assert count.sees({"b": 2}) and count.total == 5
    count.ended("a", 7)
    count.ended("c", 4)  # over before it was seen
    assert count.total == 13
    count.ended("b")  # cancelled: what was drawn of it was drawn
    assert not count.sees({}) and count.total == 13
    assert count.sees({"b": 1}), "another sample of this name"


class Slow:
    """Draws when it is told to."""

    def __init__(self) -> None:
        self.drawn: dict[str, int] = {}
        self.futures: dict[str, asyncio.Future[Result]] = {}
        self.submitted = asyncio.Event()

    def tokens(self) -> dict[str, int]:
        return dict(self.drawn)

    async def submit(self, requests: Sequence[Request], *, together: bool = False) -> list[asyncio.Future[Result]]:
        for request in requests:
            self.drawn[request.id] = 0
            self.futures[request.id] = asyncio.get_running_loop().create_future()
        self.submitted.set()
        return [self.futures[request.id] for request in requests]


def test_a_long_sample_is_no_stall_while_it_grows_and_is_one_when_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, now = Slow(), 0.0
    monkeypatch.setattr(rollout, "make_engine", lambda *args: engine)
    monkeypatch.setattr(rollout, "COUNT_SECONDS", 0.0)

    async def scenario() -> None:
        nonlocal now
        options, run = Options(n_samples_per_prompt=2), SimpleNamespace(run_id="r")
        replica = Rollout(Context("rollout-0", options, run, "", "", None, options))  # type: ignore[arg-type]
        monkeypatch.setattr(replica, "report", lambda message: None)
        replica.watchdog = dog = Watchdog(10.0, lambda problem: None, lambda: now)
        replica._admission.set()
        replica.spawn(replica._count_tokens(), "tokens")
        lease, sender = Lease(0, 0, 0, 1), object()
        order = GroupOrder(lease, 0, 0, np.zeros(2, np.int32), b"{}")
        await replica.on_generate(Generate((order,), False), sender)
        await engine.submitted.wait()

        async def stalls(seconds: int, *, growing: bool) -> bool:
            nonlocal now
            for _ in range(seconds):
                engine.drawn["0.1.0"] += growing
                now += 1.0
                await asyncio.sleep(0.005)
                if dog.look() is not None:
                    return True
            return False

        assert not await stalls(50, growing=True)
        assert replica.counters["tokens"] == 50, "the controller sees it too"
        assert await stalls(11, growing=False)
        engine.drawn.clear()
        engine.futures["0.1.1"].set_exception(BadResult("no number"))
        whole = Result("0.1.0", np.zeros(60, np.int32), np.zeros(60, np.float32), "stop", ())
        engine.futures["0.1.0"].set_result(whole)
        await asyncio.sleep(0.01)
        assert replica.counters["tokens"] == 60 and not replica.draws.running
        for task in replica._tasks:
            task.cancel()

    asyncio.run(scenario())
