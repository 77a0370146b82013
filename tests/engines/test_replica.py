"""The rollout service with a real engine: how it updates under load, cancels, leaves, and takes up parked groups."""

import asyncio
from typing import Any

import numpy as np
import pytest
from by_version import Versions, check
from conftest import Rig, prompt
from stage import Stage, order, samples_of

from relax.protocol.messages import HandedBack, Leaving, Rejected, Sampled, Score, Serving
from relax.protocol.payload import Payload
from relax.protocol.tensors import UNFINISHED, SampledGroup
from relax.services import service

Patch = pytest.MonkeyPatch


def test_a_replica_under_continuous_load_drains_and_loads(tied: Rig, monkeypatch: Patch) -> None:
    """As soon as a group ends the next one comes; three updates are served, no sample holds two versions."""

    async def scenario() -> None:
        async with Stage(tied, monkeypatch, stop_token_ids=(1, 5)) as stage:
            replica = await stage.replica()
            first, last, busy = tied.version, 0, True

            async def keep_busy() -> None:
                nonlocal last
                at = 0
                while busy:
                    while last < at + 6:
                        last += 1
                        await stage.generate(replica, order(last))
                    at += 1
                    await stage.of_group(Score, at)

            load = asyncio.create_task(keep_busy())
            for seed in (231, 232, 233):
                await tied.steps(30)
                assert replica.draws.running
                assert (await stage.serve(replica, tied.publish(seed))).running == ()
            busy = False
            await load
            groups = [await stage.sampled(group) for group in range(1, last + 1)]
            runs = [runs for group in groups for _, _, runs in samples_of(group)]
            assert {len(r) for r in runs} == {1}
            assert {r[0][0] for r in runs} >= {first + 1, first + 2, first + 3}
            assert replica.counters["groups"] == last and replica.counters["wait/weights"] > 0
            assert replica.counters["tokens"] == sum(int(group.response_lens.sum()) for group in groups)

    tied.run(scenario())


def test_with_partial_rollout_groups_go_on_through_updates(tied: Rig, monkeypatch: Patch) -> None:
    """16 samples in 4 groups, three updates: all finish, and the recorded runs are those that the engine reports."""

    async def scenario() -> None:
        async with Stage(tied, monkeypatch, tokens=200, partial_rollout=True) as stage:
            replica = await stage.replica()
            versions, first = Versions(tied), tied.version
            orders = [order(group) for group in range(4)]
            await stage.generate(replica, *orders)
            for seed in (241, 242, 243):
                await tied.steps(20)
                serving = await stage.serve(replica, versions.publish(seed))
                assert set(serving.running) == {o.lease for o in orders}
            for group in range(4):
                sampled = await stage.sampled(group)
                assert (await stage.of_group(Sampled, group)).oldest_version == first
                for i, (tokens, logprobs, runs) in enumerate(samples_of(sampled)):
                    reported: Any = replica.engine.results[f"{group}.1.{i}"]  # type: ignore[attr-defined]
                    assert list(reported.runs) == runs
                    assert [version for version, _ in runs] == [first, first + 1, first + 2, first + 3]
                    check(versions, prompt(20, group), tokens, logprobs, runs)
            kinds = [type(m) for _, m in stage.told]
            assert kinds.index(Sampled) > len(kinds) - 1 - kinds[::-1].index(Serving)
            assert not replica.draws.running and tied.engine.running == 0

    tied.run(scenario())


def test_a_group_parked_at_one_replica_goes_on_at_another(tied: Rig, monkeypatch: Patch) -> None:
    """Tokens are kept, none is lost, log-probs are right on both sides; what is finished is kept as it is."""

    async def scenario() -> None:
        async with Stage(tied, monkeypatch, tokens=150, stop_token_ids=(1, 5), partial_rollout=True) as stage:
            leaving = await stage.replica("rollout-0")
            versions, first = Versions(tied), tied.version
            await stage.generate(leaving, *(order(group) for group in range(6)))
            await tied.steps(40)
            leaving._signalled(15)
            await stage.until("rollout-0", lambda m: isinstance(m, Leaving))
            await stage.generate(leaving, order(6))  # was on its way
            words = [await stage.of_group((HandedBack, Sampled), group) for group in range(7)]
            back = {word.lease.group: word for word in words if isinstance(word, HandedBack)}
            assert tied.engine.running == 0 and not leaving.draws.running and not leaving.draws.queued
            assert back.pop(6).payload is None and back
            assert await stage.shutdown(leaving) == 0

            heir = await stage.replica("rollout-1")
            await stage.serve(heir, versions.publish(251))
            finished = 0
            for group, word in back.items():
                assert word.oldest_version == first and word.lease.attempt == 0
                before = SampledGroup.from_arrays(word.payload.arrays, "parked", parked=True)
                finished += int((before.finish != UNFINISHED).sum())
                await stage.generate(heir, order(group, fence=2, parked=word.payload))
                after = await stage.sampled(group, fence=2)
                assert (await stage.of_group(Sampled, group, fence=2)).oldest_version == first
                for i, (old, new) in enumerate(zip(samples_of(before), samples_of(after), strict=True)):
                    n = len(old[0])
                    assert np.array_equal(new[0][:n], old[0]) and np.array_equal(new[1][:n], old[1])
                    assert len(new[0]) <= 150
                    if before.finish[i] != UNFINISHED:
                        assert len(new[0]) == n and new[2] == old[2]
                    else:
                        assert new[2] == [(first, n), (first + 1, len(new[0]) - n)]
                    check(versions, prompt(20, group), *new)
            assert 0 < finished < 4 * len(back)
            asked, before_that = heir.engine.requests, leaving.engine.requests  # type: ignore[attr-defined]
            assert len(asked) == 4 * len(back) - finished
            # The random numbers of the first tokens are not drawn again.
            assert not {r.seed for r in asked.values()} & {r.seed for r in before_that.values()}

    tied.run(scenario())


def test_without_partial_rollout_groups_are_handed_back_without_tokens(tied: Rig, monkeypatch: Patch) -> None:
    """Those that wait for the replica to drain, too; what is finished is served until the replica is sent home."""

    async def scenario() -> None:
        async with Stage(tied, monkeypatch, tokens=150) as stage:
            replica = await stage.replica()
            replica.payloads._inline_limit = 0
            await stage.generate(replica, order(1))
            await stage.of_group(Score, 1)
            await stage.generate(replica, order(2))
            await tied.steps(5)
            await stage.announce(replica, tied.publish(261))
            await stage.generate(replica, order(3))
            await tied.steps(3)
            assert list(replica.draws.queued) == [3]
            replica._signalled(15)
            for group in (2, 3):
                word = await stage.of_group(HandedBack, group)
                assert (word.oldest_version, word.payload) == (None, None)
            assert len((await stage.sampled(1)).response_lens) == 4
            assert len(replica.payloads) == 1 and not replica._ended.done()
            await stage.release(replica, order(1).lease)
            assert await stage.shutdown(replica) == 0
            await tied.engine.load(tied.store.newest(), tied.store.directory, deadline=60)

    tied.run(scenario())


def test_a_released_group_that_still_runs_is_cancelled_and_never_heard_of_again(tied: Rig, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with Stage(tied, monkeypatch, tokens=200) as stage:
            replica = await stage.replica()
            await stage.generate(replica, order(1), order(2, fence=5))
            await tied.steps(10)
            await stage.release(replica, order(2, fence=4).lease)  # an older draw: not this one
            await stage.release(replica, order(1).lease)
            await stage.generate(replica, order(1, fence=2))
            await stage.sampled(2, fence=5)
            assert (await stage.sampled(1, fence=2)).response_lens.tolist() == [200] * 4
            assert {m.lease.fence for m in stage.about(1)} == {2}
            # Nothing is left in the engine, and the replica counts nothing: an update finds it drained.
            assert not replica.draws.running and tied.engine.running == 0
            await stage.serve(replica, tied.publish(271))

    tied.run(scenario())


def test_a_group_released_before_admission_opens_is_not_sampled(tied: Rig, monkeypatch: Patch) -> None:
    async def scenario() -> None:
        async with Stage(tied, monkeypatch, tokens=60) as stage:
            replica = await stage.replica()
            await stage.generate(replica, order(1))
            await stage.announce(replica, tied.publish(281))
            await stage.generate(replica, order(2), order(3))
            await stage.release(replica, order(2).lease)
            await stage.sampled(3)
            assert stage.about(2) == [] and "2.1.0" not in replica.engine.requests  # type: ignore[attr-defined]

    tied.run(scenario())


def test_what_was_parked_badly_is_rejected(tied: Rig, monkeypatch: Patch) -> None:
    def parked(**changed: Any) -> Payload:
        arrays = {
            "response_tokens": np.array([7, 8], np.int32),
            "response_lens": np.array([2, 0, 0, 0], np.int32),
            "behaviour_logprobs": np.array([-1, -1], np.float32),
            "finish": np.full(4, UNFINISHED, np.uint8),
            "runs": np.array([[0, 0, 2]], np.int64),
        }
        return Payload.inline(arrays | changed)

    async def scenario() -> None:
        async with Stage(tied, monkeypatch, tokens=8, partial_rollout=True) as stage:
            replica = await stage.replica()
            bad = {
                1: (parked(runs=np.array([[0, 0, 3]], np.int64)), "the runs of sample 0 cover 3 tokens of 2"),
                2: (parked(response_lens=np.array([2, 0], np.int32), finish=np.full(2, 2, np.uint8)), "has 2 samples"),
            }
            await stage.generate(replica, *(order(group, parked=what) for group, (what, _) in bad.items()))
            for group, (_, why) in bad.items():
                word = await stage.of_group(Rejected, group)
                assert word.reason == "bad_parked_group" and why in word.detail
            # What its producer does not hold any more is not bad: the group is drawn anew, with the same attempt.
            gone = Payload("gone", parked().specs, None, stage.mailbox.endpoint)
            await stage.generate(replica, order(3, parked=gone), order(4, parked=parked()))
            assert (await stage.of_group(HandedBack, 3)).payload is None
            assert (await stage.sampled(4)).response_lens.tolist() == [8] * 4

    tied.run(scenario())


def test_a_second_signal_ends_a_replica_and_so_does_a_controller_that_is_gone(tied: Rig, monkeypatch: Patch) -> None:
    monkeypatch.setattr(service, "LEAVE_SECONDS", 0.3)

    async def scenario() -> None:
        async with Stage(tied, monkeypatch) as stage:
            twice, orphan = await stage.replica("rollout-0"), await stage.replica("rollout-1")
            twice._signalled(15)
            await stage.until("rollout-0", lambda m: isinstance(m, Leaving))
            assert not twice._ended.done()
            twice._signalled(15)
            assert await stage.ended(twice) == 143
            stage.mailbox.abort()
            orphan._signalled(15)
            assert await stage.ended(orphan) == 143

    tied.run(scenario())
