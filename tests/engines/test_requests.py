"""Requests: seeds, ends, order, what is refused, abort."""

import asyncio

import models
import numpy as np
import pytest
from conftest import Rig, prompt, request

from relax.engines.base import EngineError, RequestRefused, Result


def same(a: Result, b: Result) -> bool:
    return np.array_equal(a.token_ids, b.token_ids)


def test_request_before_any_weights_is_refused(tied: Rig) -> None:
    assert "no weights yet" in tied.refused_before_load


def test_equal_seeds_draw_equal_samples_and_others_differ(tied: Rig) -> None:
    a, b, c = tied.generate(request("a", seed=5), request("b", seed=5), request("c", seed=6))
    assert same(a, b)
    assert not same(a, c)
    huge = tied.generate(request("d", seed=2**63 - 1), request("e", seed=2**63 - 2))
    assert not same(*huge)


def test_a_sample_depends_on_its_seed_alone_even_when_it_is_preempted(untied: Rig) -> None:
    def draw(i: int, tag: str):
        return request(f"{tag}{i}", prompt=prompt(40, i), seed=i, max_tokens=150)

    crowded = untied.generate(*(draw(i, "crowd") for i in range(16)))  # 16 x 190 tokens, the KV cache holds 2048
    for i in (0, 7, 15):
        assert same(untied.generate(draw(i, "alone"))[0], crowded[i])


def test_prompts_beyond_one_steps_tokens_are_served(tied: Rig) -> None:
    requests = [request(f"long{i}", prompt=prompt(200, i), seed=i, max_tokens=4) for i in range(24)]
    assert all(len(r.token_ids) == 4 for r in tied.generate(*requests))


def test_response_ends_at_any_of_the_checkpoints_end_tokens_and_keeps_it(tied: Rig) -> None:
    requests = [request(f"s{i}", seed=i, max_tokens=200, temperature=2.0, stop_token_ids=None) for i in range(32)]
    results = tied.generate(*requests)
    stopped = [r for r in results if r.finish_reason == "stop"]
    assert {int(r.token_ids[-1]) for r in stopped} == {models.EOS, models.OTHER_EOS}
    for r in stopped:
        assert not set(r.token_ids[:-1].tolist()) & {models.EOS, models.OTHER_EOS}
    assert all(len(r.token_ids) == 200 for r in results if r.finish_reason == "length")


def test_every_token_carries_the_version_that_sampled_it(tied: Rig) -> None:
    tied.load(tied.publish(51))
    (result,) = tied.generate(request("v"))
    assert result.runs == ((tied.version, 24),)
    assert tied.engine.info.tag.version == tied.version


def test_requests_of_one_submission_are_queued_before_the_first_step(tied: Rig) -> None:
    tied.call("watch_steps")

    async def together() -> list[Result]:
        futures = await tied.engine.submit(
            [request(f"t{i}", prompt=prompt(8, i), seed=i) for i in range(32)], together=True
        )
        return await asyncio.gather(*futures)

    for _ in range(3):
        tied.run(together())
        steps = [n for n in tied.call("steps") if n]
        assert steps == [32]


def test_abort_gives_what_there_is(tied: Rig) -> None:
    async def scenario() -> Result:
        (future,) = await tied.engine.submit([request("victim", max_tokens=236)])
        await tied.steps(5)
        seen = tied.engine.tokens()
        assert seen["victim"] > 0
        await tied.steps(5)
        assert tied.engine.tokens()["victim"] > seen["victim"], "they are told as they come"
        await tied.engine.abort(["victim", "unknown"])
        return await future

    result = tied.run(scenario())
    assert result.finish_reason == "abort" and tied.engine.tokens() == {}
    assert 0 < len(result.token_ids) < 236
    assert sum(n for _, n in result.runs) == len(result.logprobs) == len(result.token_ids)
    assert tied.engine.running == 0


def test_cancelled_call_leaves_nothing_running(tied: Rig) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(tied.engine.generate(request("cancelled", max_tokens=236)))
        await asyncio.sleep(0.03)
        assert tied.engine.running == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert tied.engine.running == 0
        await tied.engine.generate(request("cancelled", max_tokens=4))  # its id is free again

    tied.run(scenario())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": np.empty(0, np.int32)}, "empty prompt"),
        ({"max_tokens": 0}, "at least 1"),
        ({"max_tokens": 250}, r"prompt of 20 tokens and response of up to 250 do not fit .* 256"),
        ({"prompt": np.array([5, models.VOCAB], np.int32)}, r"token id 96 is outside .* 96"),
        ({"prompt": np.array([-1], np.int32)}, "token id -1 is outside"),
        ({"top_p": 0.0}, "top_p"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_request_that_cannot_be_served_is_refused(tied: Rig, fields: dict, message: str) -> None:
    with pytest.raises(RequestRefused, match=rf"request odd.*{message}"):
        tied.generate(request("odd", **fields))
    assert tied.engine.running == 0


def test_two_running_requests_cannot_share_an_id(tied: Rig) -> None:
    async def scenario() -> list:
        calls = [tied.engine.generate(request("twin")) for _ in range(2)]
        return await asyncio.gather(*calls, return_exceptions=True)

    first, second = tied.run(scenario())
    assert len(first.token_ids) == 24
    assert isinstance(second, RequestRefused)
    assert "twin is already running" in str(second)


def test_submission_is_queued_whole_or_not_at_all(tied: Rig) -> None:
    async def scenario() -> None:
        good = [request(f"part{i}", max_tokens=200) for i in range(3)]
        with pytest.raises(RequestRefused, match="part0 is already running"):
            await tied.engine.submit([*good, request("part0")], together=True)
        assert tied.engine.running == 0 and in_vllm(tied) == 0
        await tied.engine.generate(request("part0", max_tokens=2))

    tied.run(scenario())


def test_samples_cancelled_the_moment_they_are_submitted_are_drawn_no_further(tied: Rig) -> None:
    async def scenario() -> None:
        for future in (futures := await tied.engine.submit([request(f"late{i}", max_tokens=200) for i in range(3)])):
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
        assert tied.engine.running == 0 and in_vllm(tied) == 0

    tied.run(scenario())


def in_vllm(rig: Rig) -> int:
    """Requests that vLLM itself still has."""
    return rig.engine._llm.output_processor.get_num_unfinished_requests()


def test_loading_under_running_samples_is_refused(tied: Rig) -> None:
    async def scenario() -> None:
        (future,) = await tied.engine.submit([request("busy", max_tokens=100)])
        with pytest.raises(EngineError, match="1 samples are running"):
            await tied.engine.load(tied.store.newest(), tied.store.directory, deadline=60)
        await future

    tied.run(scenario())
