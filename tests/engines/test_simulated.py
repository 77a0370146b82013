"""The simulated engine, under a loop whose clock jumps to whatever is waited for: exact times, no waiting."""

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax.engines.base import EngineError, Request, RequestRefused, Result
from relax.engines.simulated import SimulatedEngine
from relax.simulation.lengths import LengthModel
from relax.weights.errors import NotStored
from relax.weights.manifest import Manifest
from relax.weights.store import ChunkStore

TINY = Path(__file__).resolve().parents[2] / "topologies" / "tiny"


class Clockwork(asyncio.SelectorEventLoop):
    """Time passes by waiting alone."""

    def __init__(self) -> None:
        loop, self.now = self, 0.0

        class Jumping(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> Any:
                loop.now += timeout or 0.0
                return super().select(0)

        super().__init__(Jumping())

    def time(self) -> float:
        return self.now


@pytest.fixture
def in_time(tmp_path: Path) -> Callable[..., Any]:
    def run(scene: Callable[..., Awaitable[Any]], lengths: str = "constant:10", **options: Any) -> Any:
        """`scene(engine, publish)` with an engine of 10 tokens a second that serves version 0."""
        loop = Clockwork()
        store = ChunkStore(tmp_path / "store", create=True)

        def publish(version: int) -> Manifest:
            tensors = [("weight", np.full(8, version, np.float32))]
            return store.publish(tensors, run_id="r", lineage=0, version=version, step=version)

        async def within() -> Any:
            engine = SimulatedEngine(
                TINY,
                lengths=LengthModel.parse(lengths),
                **{"tokens_per_second": 10, "slots": 1, "max_model_len": 10_000, "clock": loop.time} | options,
            )
            await engine.start()
            engine.store = store.directory  # type: ignore[attr-defined]
            await engine.load(publish(0), store.directory, deadline=1)
            try:
                return await scene(engine, publish)
            finally:
                await engine.shutdown()

        try:
            return loop.run_until_complete(within())
        finally:
            loop.close()

    return run


def request(name: str, max_tokens: int = 1000, seed: int | None = 1, prompt: np.ndarray | None = None) -> Request:
    return Request(name, np.arange(4, 10, dtype=np.int32) if prompt is None else prompt, max_tokens, seed=seed)


def now() -> float:
    return asyncio.get_running_loop().time()


async def ends(futures: list[asyncio.Future[Result]]) -> list[float]:
    """When each of them ended."""

    async def one(future: asyncio.Future[Result]) -> float:
        await future
        return round(now(), 2)

    return await asyncio.gather(*(one(future) for future in futures))


def test_a_sample_takes_its_tokens_at_the_speed_of_a_slot(in_time) -> None:
    async def scene(engine: SimulatedEngine, publish: Any) -> Result:
        result = await engine.generate(request("a"))
        assert now() == pytest.approx(1.0)
        return result

    result = in_time(scene)
    assert (len(result.token_ids), result.finish_reason, result.runs) == (10, "stop", ((0, 10),))
    assert result.token_ids.dtype == np.int32 and result.logprobs.dtype == np.float32
    assert np.isfinite(result.logprobs).all() and (result.logprobs <= 0).all()
    assert result.token_ids[-1] == 2, "a sample that stops ends in the checkpoint's end token"


def test_more_samples_than_slots_wait_in_order_and_slots_are_handed_on(in_time) -> None:
    async def scene(engine: SimulatedEngine, publish: Any) -> list[float]:
        return await ends(await engine.submit([request(str(i)) for i in range(5)]))

    assert in_time(scene, slots=2) == [1.0, 1.0, 2.0, 2.0, 3.0]


def test_a_late_wake_up_delays_no_sample_behind(in_time) -> None:
    async def scene(engine: SimulatedEngine, publish: Any) -> list[float]:
        futures = await engine.submit([request(str(i)) for i in range(3)])
        asyncio.get_running_loop().now += 1.7  # the process sleeps through the end of the first sample
        return await ends(futures)

    assert in_time(scene) == [1.7, 2.0, 3.0]


def test_a_sample_longer_than_its_limit_is_truncated(in_time) -> None:
    async def scene(engine: SimulatedEngine, publish: Any) -> Result:
        return await engine.generate(request("a", max_tokens=4))

    result = in_time(scene)
    assert (len(result.token_ids), result.finish_reason) == (4, "length")
    assert result.token_ids[-1] != 2


def test_lengths_and_tokens_depend_on_the_seed_alone(in_time) -> None:
    async def scene(engine: SimulatedEngine, publish: Any) -> list[Result]:
        return [await engine.generate(request(f"{i}", seed=s)) for i, s in enumerate((5, 6, 5))]

    first, other, again = in_time(scene, "lognormal:30,1")
    assert np.array_equal(first.token_ids, again.token_ids)
    assert not np.array_equal(first.token_ids, other.token_ids)


def test_a_paused_sample_keeps_its_tokens_and_records_each_version(in_time) -> None:
    async def scene(engine: SimulatedEngine, publish: Any) -> tuple[list[Result], list[float]]:
        futures = await engine.submit([request("a"), request("waits")])
        await asyncio.sleep(0.35)
        for version in (1, 2):
            await engine.pause()
            await asyncio.sleep(5)
            await engine.load(publish(version), engine.store, deadline=1)  # type: ignore[attr-defined]
            await engine.resume()
            await asyncio.sleep(0.2)
        times = await ends(futures)
        return [future.result() for future in futures], times

    (first, second), times = in_time(scene)
    assert first.runs == ((0, 3), (1, 2), (2, 5))
    assert second.runs == ((2, 10),)
    assert times == [11.0, 12.0], "a pause costs its length and nothing else"


def test_weights_are_not_loaded_under_running_samples(in_time) -> None:
    async def scene(engine: SimulatedEngine, publish: Any) -> None:
        await engine.submit([request("a")])
        with pytest.raises(EngineError, match="1 samples are running"):
            await engine.load(publish(1), engine.store, deadline=1)  # type: ignore[attr-defined]

    in_time(scene)


def test_weights_that_are_not_stored_are_refused_and_the_old_ones_serve_on(in_time) -> None:
    async def scene(engine: SimulatedEngine, publish: Any) -> Result:
        lost = publish(1)
        publish(2)
        publish(3)
        with pytest.raises(NotStored):
            await engine.load(lost, engine.store, deadline=1)  # type: ignore[attr-defined]
        return await engine.generate(request("a"))

    assert in_time(scene).runs == ((0, 10),)


def test_a_cancelled_sample_frees_its_slot_at_once(in_time) -> None:
    async def scene(engine: SimulatedEngine, publish: Any) -> list[float]:
        first, queued, third = await engine.submit([request("a"), request("b"), request("c")])
        queued.cancel()
        await asyncio.sleep(0.5)
        first.cancel()
        times = await ends([third])
        assert engine.running == 0 and engine.tokens() == {}
        return times

    assert in_time(scene) == [1.5]


def test_an_aborted_sample_gives_what_it_has(in_time) -> None:
    async def scene(engine: SimulatedEngine, publish: Any) -> list[Result]:
        futures = await engine.submit([request("a"), request("queued"), request("b")])
        await asyncio.sleep(0.45)
        assert engine.tokens() == {"a": 4, "queued": 0, "b": 0}
        await engine.abort(["a", "queued", "unknown"])
        assert (await ends(futures))[-1] == 1.45
        return [future.result() for future in futures]

    first, queued, other = in_time(scene)
    assert (first.finish_reason, first.runs, len(first.token_ids)) == ("abort", ((0, 4),), 4)
    assert (queued.finish_reason, queued.runs, len(queued.token_ids)) == ("abort", (), 0)
    assert other.finish_reason == "stop"


def test_an_engine_without_weights_samples_nothing() -> None:
    async def scene() -> None:
        engine = SimulatedEngine(
            TINY, lengths=LengthModel.parse("constant:1"), tokens_per_second=1, slots=1, max_model_len=100
        )
        await engine.start()
        with pytest.raises(EngineError, match="no weights"):
            await engine.generate(request("a", max_tokens=1))
        await engine.shutdown()
        await engine.shutdown()

    asyncio.run(scene())


def test_requests_that_cannot_be_served_are_refused(in_time) -> None:
    async def scene(engine: SimulatedEngine, publish: Any) -> None:
        await engine.submit([request("a")])
        beyond = np.array([1 << 20], np.int32)
        for refused, why in (
            (request("a"), "already running"),
            (request("fine"), "already running"),
            (request("b", max_tokens=0), "at least 1"),
            (request("c", max_tokens=10_000), "do not fit"),
            (request("d", prompt=beyond), "outside the model's vocabulary"),
            (request("e", prompt=beyond[:0]), "empty prompt"),
            (request("f", seed=None), "no seed"),
        ):
            with pytest.raises(RequestRefused, match=f"request {refused.id}.*{why}"):
                await engine.submit([request("fine"), refused])
        assert engine.running == 1, "all of a call or none"

    in_time(scene)


def test_a_full_replica_ends_thousands_of_samples_on_time(in_time) -> None:
    """Slots are busy without a gap: the last sample ends when all the work, dealt out, is done."""

    async def scene(engine: SimulatedEngine, publish: Any) -> tuple[float, int]:
        futures = await engine.submit([request(str(i), 10_000 - 10, seed=i) for i in range(2000)])
        await asyncio.gather(*futures)
        return now(), sum(len(f.result().token_ids) for f in futures)

    took, tokens = in_time(scene, "lognormal:20,1", slots=1)
    assert took == pytest.approx(tokens / 10, rel=1e-6, abs=0.01)
