"""From scored groups to the trainer's batch: order, lengths, and which arrays travel."""

import numpy as np
import pytest

from relax.algorithms import registry
from relax.config.options import Options
from relax.megatron import batches
from relax.metrics import Metrics
from relax.protocol.messages import GroupOrder, Lease
from relax.protocol.tensors import SampledGroup, TensorError, TrainTensors
from relax.services import assembly
from relax.services.assembly import ScoredGroup
from relax.services.intervals import reference_version

PPO = Options(advantage_estimator="ppo", lambd=0.9)


def group(number: int, lens: list[int], rewards: list[float], prompt: int = 3, version: int = 0) -> ScoredGroup:
    """A group whose token ids tell where they belong: 1000 group + 100 sample + position."""
    tokens = [1000 * number + 100 * i + t for i, n in enumerate(lens) for t in range(n)]
    sampled = SampledGroup(
        response_tokens=np.array(tokens, np.int32),
        response_lens=np.array(lens, np.int32),
        behaviour_logprobs=-np.array(tokens, np.float32),
        finish=np.zeros(len(lens), np.uint8),
        runs=np.array([(i, version, n) for i, n in enumerate(lens)], np.int64),
    )
    order = GroupOrder(Lease(number, 0, 0, 1), number, 0, np.full(prompt, number, np.int32), b"{}")
    return ScoredGroup(order, sampled, np.array(rewards, np.float64))


def test_members_are_joined_in_group_order_whatever_order_they_come_in() -> None:
    members = [group(2, [1, 2], [0.0, 1.0]), group(1, [3, 0], [0.5, np.nan], prompt=1)]
    members[0].reference_logprobs, members[1].reference_logprobs = (
        np.full(3, -2, np.float32),
        np.full(3, -1, np.float32),
    )
    raw = assembly.join(members, PPO)
    assert raw.group_ids.tolist() == [1, 1, 2, 2]
    assert raw.responses.prompt_lens.tolist() == [1, 1, 3, 3]
    assert raw.responses.response_lens.tolist() == [3, 0, 1, 2]
    assert raw.responses.tokens.tolist() == [1, 1000, 1001, 1002, 1, 2, 2, 2, 2000, 2, 2, 2, 2100, 2101]
    assert raw.behaviour_logprobs.tolist() == [-1000, -1001, -1002, -2000, -2100, -2101]
    assert raw.reference_logprobs is not None and raw.reference_logprobs.tolist() == [-1, -1, -1, -2, -2, -2]
    assert raw.runs.tolist() == [[0, 0, 3], [1, 0, 0], [2, 0, 1], [3, 0, 2]]
    assert raw.loss_mask.tolist() == [1, 1, 1, 1, 1, 1]


def test_what_a_group_is_asked_about_is_its_part_of_the_batch() -> None:
    members = [group(1, [2, 0], [0.0, 1.0]), group(2, [1], [1.0])]
    whole = assembly.join(members, PPO).responses
    parts = [member.responses() for member in members]
    for name in ("tokens", "prompt_lens", "response_lens"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))


def test_a_sample_without_a_reward_leaves_the_loss() -> None:
    raw = assembly.join([group(1, [2, 3], [np.nan, 1.0])], PPO)
    assert raw.loss_mask.tolist() == [0, 0, 1, 1, 1]


def test_the_critic_gets_the_values_that_the_advantages_were_made_from_and_returns() -> None:
    raw = assembly.join([group(1, [2, 1], [1.0, 0.0])], PPO)
    values = np.array([0.5, 0.25, 0.125], np.float32)
    tensors = assembly.train_tensors(registry.get("ppo"), PPO, raw, values, 0, Metrics())
    assert tensors.values is values and tensors.returns is not None
    # A = delta_t + gamma lambda A_{t+1}; returns = A + V.
    last = 1.0 - 0.25
    expected = [0.25 - 0.5 + 0.9 * last, last, -0.125]
    assert np.allclose(tensors.advantages, expected) and np.allclose(tensors.returns, np.array(expected) + values)
    batches.check(tensors.arrays())
    assert TrainTensors.from_arrays(tensors.arrays(), "batch 0").values is values


def test_reference_log_probs_travel_only_to_a_loss_with_a_kl() -> None:
    member = group(1, [2, 1], [1.0, 0.0])
    member.reference_logprobs = np.array([-1, -2, -3], np.float32)
    raw = assembly.join([member], PPO)
    with_kl = Options(use_kl_loss=True, kl_loss_coef=0.1, ref_load="ref")
    in_reward = Options(
        advantage_estimator="reinforce_plus_plus", kl_coef=0.1, normalize_advantages=True, ref_load="ref"
    )
    for options, travels in ((with_kl, True), (in_reward, False)):
        spec = registry.get(options.advantage_estimator)
        arrays = assembly.train_tensors(spec, options, raw, None, 0, Metrics()).arrays()
        assert ("reference_logprobs" in arrays) == travels and not {"values", "returns"} & arrays.keys()


def test_groups_that_were_left_out_are_counted_for_rloo() -> None:
    options = Options(advantage_estimator="rloo", calculate_per_token_loss=True)
    metrics = Metrics()
    raw = assembly.join([group(1, [2, 1], [1.0, 0.0])], PPO)
    assembly.train_tensors(registry.get("rloo"), options, raw, None, 3, metrics)
    assert metrics.values()["rollout/rloo/dropped_group_frac"] == 0.75


def test_an_optional_array_of_a_wrong_length_is_refused() -> None:
    raw = assembly.join([group(1, [2, 1], [1.0, 0.0])], PPO)
    arrays = assembly.train_tensors(registry.get("ppo"), PPO, raw, np.zeros(3, np.float32), 0, Metrics()).arrays()
    with pytest.raises(TensorError, match="batch 7: values has 2 entries, the lengths say 3"):
        TrainTensors.from_arrays(arrays | {"values": np.zeros(2, np.float32)}, "batch 7")
    with pytest.raises(TensorError, match="batch 7: TrainTensors lacks advantages"):
        TrainTensors.from_arrays({n: a for n, a in arrays.items() if n != "advantages"}, "batch 7")


@pytest.mark.parametrize(
    ("interval", "versions"), [(None, [0] * 7), (1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 0, 0, 3, 3, 3, 6])]
)
def test_a_batch_has_one_reference_version(interval: int | None, versions: list[int]) -> None:
    assert [reference_version(batch, interval) for batch in range(7)] == versions
