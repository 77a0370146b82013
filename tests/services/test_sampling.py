"""Groups that go on elsewhere: what is asked of the engine, how the parts are joined, and which version counts."""

from typing import Any

import numpy as np
import pytest

from relax.config.options import Options
from relax.data.seeds import sample_seed
from relax.engines.base import Result
from relax.protocol.messages import GroupOrder, Lease
from relax.protocol.payload import Payload
from relax.protocol.tensors import UNFINISHED, SampledGroup, TensorError
from relax.services import assembly, sampling
from relax.services.assembly import ScoredGroup
from relax.services.versions import oldest_version, trainable

OPTIONS = Options(n_samples_per_prompt=3, rollout_max_response_len=10, seed=5)
MASKED = Options(
    n_samples_per_prompt=3, max_staleness=4, partial_rollout=True, mask_offpolicy_in_partial_rollout=True, use_tis=True
)
PROMPT = np.array([50, 51], np.int32)


def result(name: str, runs: list[tuple[int, int]], reason: Any) -> Result:
    n = sum(length for _, length in runs)
    return Result(name, np.arange(n, dtype=np.int32), -np.arange(n, dtype=np.float32), reason, tuple(runs))


PARKED = [result("4.1.0", [(1, 2), (2, 1)], "abort"), result("4.1.1", [(1, 3)], "stop"), result("4.1.2", [], "abort")]


def order(parked: Payload | None = None, fence: int = 1) -> GroupOrder:
    return GroupOrder(Lease(4, 1, 0, fence), 9, 2, PROMPT, b"{}", parked)


def test_a_new_group_is_one_of_which_nothing_has_been_drawn() -> None:
    requests = sampling.requests(order(), sampling.begun(order(), OPTIONS), OPTIONS)
    assert [r.id for r in requests] == ["4.1.0", "4.1.1", "4.1.2"]
    assert all(np.array_equal(r.prompt, PROMPT) and r.max_tokens == 10 for r in requests)
    assert [r.seed for r in requests] == [sample_seed(5, 2, 9, i, 1) for i in range(3)]


def test_a_parked_group_goes_on_where_it_stopped() -> None:
    arrays = sampling.bundle(PARKED).arrays()
    again = order(Payload.inline(arrays), fence=2)
    begun = sampling.begun(again, OPTIONS)
    first, last = sampling.requests(again, begun, OPTIONS)
    assert (first.id, last.id) == ("4.2.0", "4.2.2"), "the finished sample is not drawn again"
    assert first.prompt.tolist() == [50, 51, 0, 1, 2] and first.max_tokens == 7
    assert last.prompt.tolist() == [50, 51] and last.max_tokens == 10
    assert first.seed == sample_seed(5, 2, 9, 0, 1, 3) and last.seed == sample_seed(5, 2, 9, 2, 1)
    drawn = [result("4.2.2", [(3, 4)], "length"), result("4.2.0", [(2, 2), (3, 1)], "stop")]
    samples = sampling.joined(begun, drawn)
    assert sampling.finished(samples) and not sampling.finished(begun)
    assert [s.runs for s in samples] == [((1, 2), (2, 3), (3, 1)), ((1, 3),), ((3, 4),)]
    assert samples[0].token_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert samples[0].logprobs.tolist() == [0, -1, -2, 0, -1, -2]
    group = SampledGroup.from_arrays(sampling.bundle(samples).arrays(), "it")
    assert group.response_lens.tolist() == [6, 3, 4] and group.finish.tolist() == [0, 0, 1]


def test_the_seed_of_a_sample_that_goes_on_is_another_one() -> None:
    seeds = [sample_seed(1, 0, 0, 0, 0, offset) for offset in range(100)]
    assert len(set(seeds)) == 100 and seeds[0] == sample_seed(1, 0, 0, 0, 0)


def test_only_a_parked_group_may_hold_what_is_unfinished() -> None:
    arrays = sampling.bundle(PARKED).arrays()
    assert SampledGroup.from_arrays(arrays, "it", parked=True).finish.tolist() == [UNFINISHED, 0, UNFINISHED]
    with pytest.raises(TensorError, match="it: sample 0 has finish 2, which a finished group has not"):
        SampledGroup.from_arrays(arrays, "it")
    with pytest.raises(TensorError, match="it: sample 1 has finish 7, which a parked group has not"):
        SampledGroup.from_arrays(arrays | {"finish": np.array([2, 7, 2], np.uint8)}, "it", parked=True)
    with pytest.raises(TensorError, match="it: sample 2 has no version run"):
        SampledGroup.from_arrays(arrays | {"finish": np.array([2, 0, 0], np.uint8)}, "it", parked=True)
    with pytest.raises(TensorError, match="it: runs are not in the order of the samples"):
        SampledGroup.from_arrays(arrays | {"runs": arrays["runs"][[2, 0, 1]]}, "it", parked=True)


def test_the_oldest_version_is_that_of_the_oldest_token_that_may_be_trained() -> None:
    group = sampling.bundle(
        [result("a", [(1, 2), (3, 1)], "stop"), result("b", [(4, 1), (2, 1)], "stop"), result("c", [(3, 5)], "length")]
    )
    assert oldest_version(group, OPTIONS) == 1
    assert oldest_version(group, MASKED) == 3
    assert trainable(group.runs, OPTIONS).all()
    # The newest version of b is not that of its last run: it went on at a replica that was behind.
    assert trainable(group.runs, MASKED).tolist() == [False, True, True, False, True]
    assert oldest_version(sampling.bundle([result("a", [], "abort")]), MASKED) is None


def test_masked_tokens_leave_the_loss_and_no_others() -> None:
    samples = [
        result("a", [(1, 2), (3, 1)], "stop"),
        result("b", [(2, 2)], "stop"),
        result("c", [(1, 1), (2, 2)], "stop"),
    ]
    scored = ScoredGroup(order(), sampling.bundle(samples), np.array([1.0, 0.0, np.nan]))
    other = ScoredGroup(
        GroupOrder(Lease(5, 0, 0, 1), 9, 2, PROMPT, b"{}"), sampling.bundle(samples[:2]), np.array([1.0, 0.0])
    )
    assert assembly.join([other, scored], MASKED).loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1]
    assert assembly.join([other, scored], OPTIONS).loss_mask.tolist() == [1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1]
