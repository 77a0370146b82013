"""Step-0 identity: behaviour log-probs are those of the published weights, whatever was loaded before."""

import asyncio

import models
import numpy as np
import pytest
from conftest import Rig, prompt, request

from relax.engines.base import Result

TOLERANCE = 1e-4


@pytest.fixture(params=["tied", "untied"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return request.getfixturevalue(request.param)


def check(rig: Rig, **fields) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate([5, 33, 64, 20])]
    requests = [request(f"{i}", prompt=p, seed=i, **fields) for i, p in enumerate(prompts)]
    results = rig.generate(*requests)
    for one, p in zip(results, prompts, strict=True):
        assert len(one.token_ids) == len(one.logprobs) == 24
        assert one.logprobs.dtype == np.float32
        assert one.token_ids.dtype == np.int32
        assert rig.error(one, p, fields.get("temperature", 1.0)) < TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers(rig: Rig, temperature: float) -> None:
    check(rig, temperature=temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_follow_every_update(rig: Rig, temperature: float) -> None:
    for seed in (11, 12, 13):
        rig.load(rig.publish(seed))
        check(rig, temperature=temperature)


def test_tied_head_is_wrong_without_its_refresh(tied: Rig) -> None:
    manifest = tied.publish(21)
    tied.call("load_without_refresh", manifest.to_json(), str(tied.store.directory))
    assert tied.error(tied.generate(request("stale"))[0], prompt()) > 100 * TOLERANCE
    tied.load(manifest)
    assert tied.error(tied.generate(request("fresh"))[0], prompt()) < TOLERANCE


def test_prefix_cache_does_not_outlive_its_weights(untied: Rig) -> None:
    long = prompt(120)
    untied.generate(request("warm", prompt=long))
    untied.load(untied.publish(31))
    assert untied.error(untied.generate(request("cold", prompt=long))[0], long) < TOLERANCE


def test_truncated_sampling_gives_the_truncated_distribution(tied: Rig) -> None:
    (result,) = tied.generate(request("k", top_k=2))
    reference = models.reference_logprobs(tied.model, prompt(), result.token_ids).numpy()
    assert np.all(result.logprobs > reference)  # two tokens share all of the mass
    assert np.all(np.exp(result.logprobs) <= 1.0 + 1e-6)


def test_checkpoints_sampling_preferences_do_not_reach_the_engine(tied: Rig) -> None:
    results = tied.generate(*(request(f"g{i}", seed=i, max_tokens=8) for i in range(4)))
    assert len({tuple(r.token_ids) for r in results}) == 4  # its generation_config.json asks for top_k = 1


def test_samples_in_flight_go_on_under_new_weights_after_a_pause(tied: Rig) -> None:
    tied.load(tied.publish(41))
    old = models.make_model(tied.store.directory.parent / "old", seed=41)
    new = tied.publish(42)

    async def update_in_flight() -> Result:
        (future,) = await tied.engine.submit([request("flight", max_tokens=230)])
        await asyncio.sleep(0.02)
        await tied.engine.pause()
        await tied.engine.load(new, tied.store.directory, deadline=60)
        await tied.engine.resume()
        return await future

    result = tied.run(update_in_flight())
    assert [version for version, _ in result.runs] == [new.tag.version - 1, new.tag.version]
    cut = result.runs[0][1]
    for model, part in ((old, slice(0, cut)), (tied.model, slice(cut, None))):
        expected = models.reference_logprobs(model, prompt(), result.token_ids).numpy()
        assert np.abs(expected - result.logprobs)[part].max() < TOLERANCE


def test_greedy_is_the_most_likely_token(untied: Rig) -> None:
    (result,) = untied.generate(request("greedy", temperature=0.0))
    other = untied.generate(request("greedy2", temperature=0.0, seed=99))[0]
    assert np.array_equal(result.token_ids, other.token_ids)


@pytest.mark.long
def test_bf16_engine_serves_fp32_weights_as_a_bf16_model_would(tmp_path) -> None:
    rig = Rig(tmp_path, "qwen3", True, asyncio.new_event_loop, dtype="bfloat16")
    try:
        rig.load(rig.publish(71))
        (result,) = rig.generate(request("b"))
        halved = models.make_model(tmp_path / "half", seed=71)
        expected = models.reference_logprobs(halved.bfloat16(), prompt(), result.token_ids).numpy()
        assert np.abs(expected - result.logprobs).mean() < 0.05  # bf16 against bf16: another order of sums
        full = models.make_model(tmp_path / "full", seed=72)
        other = models.reference_logprobs(full, prompt(), result.token_ids).numpy()
        assert np.abs(other - result.logprobs).mean() > 0.5
    finally:
        rig.close()
