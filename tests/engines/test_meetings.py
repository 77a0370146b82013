"""What happens when something comes while weights are under way: a request, or a version that is gone already."""

import asyncio

import pytest
from by_version import Versions, check
from conftest import Rig, prompt, request
from stage import Stage, order, samples_of
from structlog.testing import capture_logs

from relax.protocol.messages import Serving


def test_a_request_that_comes_while_weights_are_loaded_is_of_the_new_ones_alone(tied: Rig) -> None:
    versions = Versions(tied)
    manifest = versions.publish(311)

    async def scenario() -> list:
        load = asyncio.create_task(tied.engine.load(manifest, tied.store.directory, deadline=60))
        await asyncio.sleep(0)  # the load has begun
        asked = [tied.engine.generate(request(f"meets {i}", seed=i)) for i in range(4)]
        results = await asyncio.gather(*asked)
        assert load.done()
        return results

    for result in tied.run(scenario()):
        assert result.runs == ((manifest.tag.version, 24),)
        check(versions, prompt(), result.token_ids, result.logprobs, list(result.runs))


@pytest.mark.parametrize("partial", [False, True])
def test_a_version_that_is_gone_before_it_is_loaded_is_skipped(
    tied: Rig, monkeypatch: pytest.MonkeyPatch, partial: bool
) -> None:
    """The store keeps two versions; the announcement of an older one may come late. The replica goes on to the next."""

    async def scenario() -> None:
        async with Stage(tied, monkeypatch, tokens=20, partial_rollout=partial) as stage:
            replica = await stage.replica()
            gone, _, newest = (tied.publish(seed) for seed in (321, 322, 323))
            with capture_logs() as logs:
                await stage.announce(replica, gone)
                await stage.serve(replica, newest)
            assert [(r["event"], r["version"]) for r in logs if "version" in r] == [
                ("version_overtaken", gone.tag.version),
                ("weights_loaded", newest.tag.version),
            ]
            served = [message.version for _, message in stage.told if isinstance(message, Serving)]
            assert served == [gone.tag.version - 1, newest.tag.version]
            await stage.generate(replica, order(1))
            runs = [runs for _, _, runs in samples_of(await stage.sampled(1))]
            assert runs == [[(newest.tag.version, 20)]] * 4

    tied.run(scenario())
