"""Ragged batches: what is refused, how they are cut, and where every token ends up in a padded micro-batch."""

import numpy as np
import pytest
import torch

from relax.megatron import batches
from relax.megatron.batches import BatchError
from tests.megatron import tiny


def by_hand():
    """Two samples: prompt [5, 6] response [7, 8, 9]; prompt [1] response [2]."""
    return {
        "tokens": np.array([5, 6, 7, 8, 9, 1, 2], np.int32),
        "prompt_lens": np.array([2, 1], np.int32),
        "response_lens": np.array([3, 1], np.int32),
        "loss_mask": np.array([1, 0, 1, 1], np.uint8),
        "advantages": np.array([0.1, 0.2, 0.3, 0.4], np.float32),
        "rewards": np.array([1.0, 0.0]),
        "group_ids": np.array([4, 4]),
        "runs": np.array([[0, 3, 2], [0, 4, 1], [1, 3, 1]]),
    }


def micros(batch, size=8, multiple=1):
    batches.check(batch)
    return batches.micro_batches(
        batch, 0, batches.num_samples(batch), size, multiple=multiple, device=torch.device("cpu")
    )


def test_a_micro_batch_by_hand():
    (micro,) = micros(by_hand())
    assert micro.tokens.tolist() == [[5, 6, 7, 8, 9], [1, 2, 0, 0, 0]]
    # Each response token is predicted from the token before it, the first one from the end of the prompt.
    assert list(zip(micro.row.tolist(), micro.position.tolist(), micro.target.tolist(), strict=True)) == [
        (0, 1, 7),
        (0, 2, 8),
        (0, 3, 9),
        (1, 0, 2),
    ]
    assert micro.fields["response_mask"].tolist() == [[True, True, True], [True, False, False]]
    assert micro.fields["loss_mask"].tolist() == [[True, False, True], [True, False, False]]
    torch.testing.assert_close(micro.fields["advantages"], torch.tensor([[0.1, 0.2, 0.3], [0.4, 0, 0]]))
    assert micro.fields["rewards"].tolist() == [1.0, 0.0]
    assert micro.pad(torch.tensor([1.0, 2, 3, 4])).tolist() == [[1, 2, 3], [4, 0, 0]]


def test_widths_are_rounded_up_and_padding_is_masked():
    (micro,) = micros(by_hand(), multiple=4)
    assert micro.tokens.shape == (2, 8)
    assert micro.fields["response_mask"].sum() == 4


@pytest.mark.parametrize("size", [1, 2, 3, 8, 100])
def test_micro_batches_cover_every_response_token_once(size):
    batch = tiny.batch()
    parts = micros(batch, size)
    assert all(len(part.tokens) <= size for part in parts)
    assert [part.first_token for part in parts] == np.cumsum([0] + [len(p.row) for p in parts])[:-1].tolist()
    for name in ("loss_mask", "advantages", "behaviour_logprobs"):
        flat = torch.cat([part.fields[name][part.row, part.column] for part in parts])
        np.testing.assert_array_equal(flat.numpy().astype(batch[name].dtype), batch[name])


@pytest.mark.parametrize("samples", [0, 1, 5, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_shares_are_contiguous_complete_and_even(samples, ranks):
    shares = [batches.share(samples, rank, ranks) for rank in range(ranks)]
    assert [s for s, _ in shares] == [0, *(e for _, e in shares[:-1])]
    assert shares[-1][1] == samples
    sizes = [e - s for s, e in shares]
    assert max(sizes) - min(sizes) <= 1


def test_an_empty_share_is_one_idle_micro_batch():
    (micro,) = batches.micro_batches(by_hand(), 1, 1, 4, multiple=1, device=torch.device("cpu"))
    assert micro.idle
    assert micro.tokens.shape[0] == 1


def test_parts_are_batches_that_join_to_the_whole():
    batch = tiny.batch()
    parts = list(batches.split(batch, 3))
    assert [batches.num_samples(part) for part in parts] == [3, 3, 2]
    for part in parts:
        batches.check(part)
    for name in batch.keys() - {"runs"}:
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), batch[name])


def test_version_runs_are_renumbered_in_a_part():
    assert batches.select(by_hand(), 1, 2)["runs"].tolist() == [[0, 3, 1]]


def test_received_read_only_arrays_are_taken():
    batch = by_hand()
    for array in batch.values():
        array.flags.writeable = False
    micros(batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": None}, None),
        ({"response_lens": None}, "lacks response_lens"),
        ({"advantages": np.zeros(5, np.float32)}, r"advantages is float32 \[5\]; here it must be float32 \[4\]"),
        ({"advantages": np.zeros(4)}, r"advantages is float64 \[4\]; here it must be float32"),
        ({"tokens": np.zeros(6, np.int32)}, r"tokens is int32 \[6\]; here it must be int32 \[7\]"),
        ({"prompt_lens": np.array([3, 0], np.int32)}, "sample 1 has a prompt of 0"),
        ({"rewards": np.zeros(3)}, r"rewards is float64 \[3\]; here it must be float64 \[2\]"),
        ({"advantage": np.zeros(4, np.float32)}, "holds 'advantage', which is none of"),
    ],
)
def test_batches_that_contradict_themselves_are_refused(change, message):
    batch = {name: array for name, array in (by_hand() | change).items() if array is not None}
    if message is None:
        batches.check(batch)
        return
    with pytest.raises(BatchError, match=message):
        batches.check(batch)
