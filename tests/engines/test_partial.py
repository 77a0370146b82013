"""Running samples and new weights: what is kept, what is computed again, what is drawn next."""

import asyncio

import numpy as np
from by_version import TOLERANCE, Versions, check
from conftest import Rig, prompt, request

from relax.engines.base import Result


def test_sixteen_running_samples_go_on_through_three_updates(tied: Rig) -> None:
    versions = Versions(tied)
    tied.load(versions.publish(200))
    first = tied.version
    requests = [request(f"flight{i}", prompt=prompt(20, i), seed=i, max_tokens=200) for i in range(16)]

    async def scenario() -> list[Result]:
        futures = await tied.engine.submit(requests)
        for seed in (201, 202, 203):
            await tied.steps(20)
            await tied.engine.pause()
            await tied.engine.load(versions.publish(seed), tied.store.directory, deadline=60)
            await tied.engine.resume()
        return await asyncio.gather(*futures)

    for asked, result in zip(requests, tied.run(scenario()), strict=True):
        assert (result.finish_reason, len(result.token_ids)) == ("length", 200)
        assert [version for version, _ in result.runs] == [first, first + 1, first + 2, first + 3]
        check(versions, asked.prompt, result.token_ids, result.logprobs, list(result.runs))


def test_a_sample_whose_keys_are_dropped_draws_what_it_would_have_drawn(untied: Rig) -> None:
    """vLLM preempts paused samples when their cache is dropped; their generators must go on where they were. The batch
    is larger than the cache, so samples are preempted for want of room as well."""

    def draws(tag: str):
        return [request(f"{tag}{i}", prompt=prompt(40, i), seed=i, max_tokens=150) for i in range(16)]

    async def disturbed() -> list[Result]:
        futures = await untied.engine.submit(draws("dropped"))
        for _ in range(3):
            await untied.steps(20)
            await untied.engine.pause()
            assert await untied.engine._llm.reset_prefix_cache(reset_running_requests=True)
            await untied.engine.resume()
        return await asyncio.gather(*futures)

    for calm, result in zip(untied.generate(*draws("calm")), untied.run(disturbed()), strict=True):
        assert np.array_equal(calm.token_ids, result.token_ids)
        assert np.abs(calm.logprobs - result.logprobs).max() < TOLERANCE


def test_a_prompt_that_a_running_sample_shares_is_read_again_by_new_weights(tied: Rig) -> None:
    long = prompt(120)

    async def scenario() -> Result:
        (running,) = await tied.engine.submit([request("holder", prompt=long, max_tokens=100)])
        await tied.steps(5)
        await tied.engine.pause()
        await tied.engine.load(tied.publish(211), tied.store.directory, deadline=60)
        await tied.engine.resume()
        late = await tied.engine.generate(request("late", prompt=long))
        await running
        return late

    assert tied.error(tied.run(scenario()), long) < TOLERANCE


def test_requests_that_come_while_the_engine_is_paused_are_of_the_new_version_alone(tied: Rig) -> None:
    async def scenario() -> Result:
        await tied.engine.pause()
        (future,) = await tied.engine.submit([request("queued")])
        await tied.engine.load(tied.publish(221), tied.store.directory, deadline=60)
        await tied.engine.resume()
        return await future

    result = tied.run(scenario())
    assert result.runs == ((tied.version, 24),)
    assert tied.error(result, prompt()) < TOLERANCE


def test_cancelled_samples_free_their_slots(untied: Rig) -> None:
    """The engine runs 16 samples at once: the next 16 start in one step only if none of the cancelled is left."""
    untied.call("watch_steps")

    async def scenario() -> None:
        cancelled = await untied.engine.submit([request(f"c{i}", prompt=prompt(8, i), seed=i) for i in range(16)])
        await untied.steps(2)
        for future in cancelled:
            future.cancel()
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*cancelled, return_exceptions=1))
        assert untied.engine.running == 0
        again = [request(f"n{i}", prompt=prompt(8, i), seed=i, max_tokens=4) for i in range(16)]
        await asyncio.gather(*await untied.engine.submit(again, together=True))

    untied.run(scenario())
    assert [n for n in untied.call("steps") if n][-1] == 16


def test_samples_aborted_while_the_engine_is_paused_come_with_what_they_have(tied: Rig) -> None:
    async def scenario() -> Result:
        (future,) = await tied.engine.submit([request("held", max_tokens=200)])
        await tied.steps(10)
        await tied.engine.pause()
        await tied.engine.abort(["held"])
        result = await future
        await tied.engine.resume()
        return result

    result = tied.run(scenario())
    assert result.finish_reason == "abort" and 0 < len(result.token_ids) < 200
    assert result.runs == ((tied.version, len(result.token_ids)),)
    assert tied.error(result, prompt()) < TOLERANCE
