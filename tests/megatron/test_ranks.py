"""Commands of rank 0: which methods are some, what they carry, and what a stream that was left does. Several ranks are
led in test_grid.py."""

import asyncio

import numpy as np
import pytest

from relax.services import ranks
from relax.services.ranks import Leader, Ranks, command
from tests.megatron import tiny


class Work:
    """Remembers what it was told."""

    def __init__(self, options, start):
        self.options, self.told = options, [start]

    @command
    def add(self, arrays, times, *, other=None):
        self.told.append(times)
        return arrays["x"].sum() * times + (0 if other is None else other["y"].sum())

    @command
    def count(self, stop):
        return iter(range(stop))

    def secret(self):
        return "not for all ranks"


def test_a_command_carries_arrays_and_values_and_returns_rank_0s_result():
    options = tiny.options()
    leader = Leader(Work, options, start="begin")
    x, y = np.arange(4), np.ones(3)
    assert leader.run(leader.work.add, {"x": x}, 2, other={"y": y}) == 15
    assert leader.work.options is options
    assert leader.work.told == ["begin", 2]


def test_a_method_that_is_no_command_is_refused():
    leader = Leader(Work, tiny.options(), 0)
    with pytest.raises(TypeError, match="secret is no command"):
        leader.run(leader.work.secret)


@pytest.mark.parametrize("taken", [0, 2])
def test_a_stream_that_was_not_taken_whole_stops_the_next_command(taken):
    leader = Leader(Work, tiny.options(), 0)
    stream = leader.run(leader.work.count, 3)
    assert [next(stream) for _ in range(taken)] == list(range(taken))
    stream.close()
    with pytest.raises(RuntimeError, match="idle follows count, whose result was not taken whole"):
        leader.idle()


def test_a_stream_taken_whole_does_not():
    leader = Leader(Work, tiny.options(), 0)
    assert list(leader.run(leader.work.count, 3)) == [0, 1, 2]
    leader.end()


def test_commands_from_an_event_loop_run_one_by_one_and_idle_goes_between(monkeypatch):
    monkeypatch.setattr(ranks, "IDLE_SECONDS", 0.001)

    async def life():
        led: Ranks[Work] = Ranks("test")
        work = await led.build(Work, tiny.options(), 0)
        keeping = asyncio.create_task(led.keep())
        for times in range(5):
            assert await led.run(work.add, {"x": np.ones(2)}, times) == 2 * times
            await asyncio.sleep(0.002)
        assert await led.lead(lambda leader: list(leader.run(work.count, 2))) == [0, 1]
        assert not keeping.done()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await led.close(clean=True)
        return work.told

    assert asyncio.run(life()) == [0, 0, 1, 2, 3, 4]


def test_ranks_that_were_never_built_can_be_closed():
    asyncio.run(Ranks("test").close(clean=True))
