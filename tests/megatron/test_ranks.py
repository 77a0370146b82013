"""Commands of rank 0: which methods are some, what they carry, and what a stream that was left does. Several ranks are
led in test_grid.py."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from relax.services import ranks
from relax.services.ranks import Leader, Ranks, command, in_lane
from tests.megatron import tiny


class Work:
    """Remembers what it was told."""

    def __init__(self, options, start):
        self.options, self.told, self.go_on = options, [start], threading.Event()

    @command
    def add(self, arrays, times, *, other=None):
        self.told.append(times)
        return arrays["x"].sum() * times + (0 if other is None else other["y"].sum())

    @command
    def count(self, stop):
        return iter(range(stop))

    @in_lane("beside")
    def wait(self, seconds):
        assert self.go_on.wait(seconds)
        return threading.current_thread().name

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


def test_lanes_go_on_beside_each_other_and_idle_goes_into_each(monkeypatch):
    monkeypatch.setattr(ranks, "IDLE_SECONDS", 0.001)
    told = []
    monkeypatch.setattr(Leader, "idle", lambda leader, lane: told.append((lane, threading.current_thread().name)))

    async def life():
        led: Ranks[Work] = Ranks("test")
        work = await led.build(Work, tiny.options(), 0)
        keeping = asyncio.create_task(led.keep())
        waiting = asyncio.create_task(led.run(work.wait, 60))
        for times in range(3):  # the model's lane does not wait for the other one
            assert await led.run(work.add, {"x": np.ones(2)}, times) == 2 * times
        assert not waiting.done()
        work.go_on.set()
        assert (await waiting).startswith("test-beside")
        for _ in range(10_000):
            if {lane for lane, _ in told} == {"model", "beside"}:
                break
            await asyncio.sleep(0.002)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await led.close(clean=True)

    asyncio.run(life())
    assert {lane for lane, _ in told} == {"model", "beside"}
    assert all(name.startswith(f"test-{lane}") for lane, name in told)


def test_keeping_the_ranks_fails_with_the_cause_itself(monkeypatch):
    monkeypatch.setattr(ranks, "IDLE_SECONDS", 0.001)

    def lost(leader, lane):
        raise ConnectionError(f"{lane}: rank 1 is gone")

    monkeypatch.setattr(Leader, "idle", lost)

    async def life():
        led: Ranks[Work] = Ranks("test")
        await led.build(Work, tiny.options(), 0)
        with pytest.raises(ConnectionError, match="rank 1 is gone"):
            await led.keep()
        await led.close(clean=False)

    asyncio.run(life())


FAILS = """
import os
from relax.services.ranks import Leader, command, follow, in_lane
from tests.megatron import tiny


class Work:
    def __init__(self, options):
        pass

    @command
    def nothing(self):
        pass

    @in_lane("beside")
    def fail(self):
        if os.environ["RANK"] == "1":
            raise ArithmeticError("rank 1 cannot do this")


options = tiny.options(tensor_parallel_size=2)
if os.environ["RANK"] == "1":
    follow(Work, options)
leader = Leader(Work, options)
leader.run(leader.work.nothing)
leader.run(leader.work.fail)
"""


def test_a_lane_that_fails_on_another_rank_ends_that_rank_and_the_command(tmp_path):
    """Though that rank's other lane waits for its next command."""
    (tmp_path / "fails.py").write_text(FAILS)
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
    run += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(tmp_path / "fails.py")]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    done = subprocess.run(run, cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "ArithmeticError: rank 1 cannot do this" in done.stderr
