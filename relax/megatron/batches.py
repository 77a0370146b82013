"""From the ragged batch that travels to the padded micro-batches that the network computes.

A ragged batch is a dict of flat numpy arrays, sample after sample. `tokens` (int32) holds prompt then response;
`prompt_lens` and `response_lens` (int32 [N]) cut it. Other arrays hold one value a response token, one a sample, or the
version runs; which it is follows from the array's name (the tables below), because for some batches the lengths agree.
Padding is added here, at the last moment, on the right, and masks come from lengths alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Batch = Mapping[str, np.ndarray]

TOKEN_ARRAYS: dict[str, Any] = {
    "loss_mask": np.uint8,
    "behaviour_logprobs": np.float32,
    "proximal_logprobs": np.float32,
    "reference_logprobs": np.float32,
    "advantages": np.float32,
    "returns": np.float32,
    "values": np.float32,
}
SAMPLE_ARRAYS: dict[str, Any] = {"rewards": np.float64, "group_ids": np.int64}
_LENGTHS = ("tokens", "prompt_lens", "response_lens")


class BatchError(ValueError):
    """A batch that contradicts itself; the text names the array, what it holds, and what the lengths say."""


def check(batch: Batch) -> None:
    """Raises BatchError unless every array is known, has its dtype, and is as long as the lengths say."""
    if missing := [name for name in _LENGTHS if name not in batch]:
        raise BatchError(f"the batch lacks {', '.join(missing)}")
    prompts, responses = batch["prompt_lens"], batch["response_lens"]
    samples, tokens = len(prompts), int(responses.sum())
    if samples == 0:
        raise BatchError("the batch has no sample")
    _check(batch, "prompt_lens", np.int32, (samples,))
    _check(batch, "response_lens", np.int32, (samples,))
    _check(batch, "tokens", np.int32, (int(prompts.sum()) + tokens,))
    if prompts.min() < 1 or responses.min() < 0:
        bad = int(np.flatnonzero((prompts < 1) | (responses < 0))[0])
        raise BatchError(
            f"sample {bad} has a prompt of {prompts[bad]} and a response of {responses[bad]} tokens; a prompt has at "
            f"least one, because the first response token is predicted from it"
        )
    for name, array in batch.items():
        if name in _LENGTHS:
            continue
        if name in TOKEN_ARRAYS:
            _check(batch, name, TOKEN_ARRAYS[name], (tokens,))
        elif name in SAMPLE_ARRAYS:
            _check(batch, name, SAMPLE_ARRAYS[name], (samples,))
        elif name == "runs":
            _check(batch, name, np.int64, (len(array), 3))
        else:
            known = ", ".join([*_LENGTHS, *TOKEN_ARRAYS, *SAMPLE_ARRAYS, "runs"])
            raise BatchError(f"the batch holds {name!r}, which is none of {known}")


def _check(batch: Batch, name: str, dtype: Any, shape: tuple[int, ...]) -> None:
    array = batch[name]
    if array.dtype != dtype or array.shape != shape:
        raise BatchError(
            f"{name} is {array.dtype} {list(array.shape)}; here it must be {np.dtype(dtype)} {list(shape)}"
        )


def num_samples(batch: Batch) -> int:
    return len(batch["prompt_lens"])


def num_loss_tokens(batch: Batch) -> int:
    """Response tokens that count in the loss."""
    return int(np.count_nonzero(batch["loss_mask"]))


def select(batch: Batch, start: int, stop: int) -> dict[str, np.ndarray]:
    """Samples [start, stop) as a batch of their own, views where possible."""
    prompts, responses = batch["prompt_lens"], batch["response_lens"]
    whole = np.concatenate([[0], np.cumsum(prompts.astype(np.int64) + responses)])
    response = _offsets(responses)
    part: dict[str, np.ndarray] = {}
    for name, array in batch.items():
        if name == "tokens":
            part[name] = array[whole[start] : whole[stop]]
        elif name in TOKEN_ARRAYS:
            part[name] = array[response[start] : response[stop]]
        elif name == "runs":
            inside = (array[:, 0] >= start) & (array[:, 0] < stop)
            part[name] = array[inside] - np.array([start, 0, 0])
        else:
            part[name] = array[start:stop]
    return part


def split(batch: Batch, samples: int) -> Iterator[dict[str, np.ndarray]]:
    """Contiguous parts of so many samples each; the last has what remains."""
    for start in range(0, num_samples(batch), samples):
        yield select(batch, start, min(start + samples, num_samples(batch)))


def steps(batch: Batch, count: int) -> Iterator[dict[str, np.ndarray]]:
    """The contiguous parts of a rollout batch that its `count` optimizer steps take, for every model that trains on it.

    A short last batch may give fewer parts than `count`.
    """
    return split(batch, -(-num_samples(batch) // count))


def share(samples: int, rank: int, ranks: int) -> tuple[int, int]:
    """The contiguous range of samples of a data-parallel rank; shares differ by at most one sample and may be empty."""
    return samples * rank // ranks, samples * (rank + 1) // ranks


def _offsets(lens: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lens.astype(np.int64))])


@dataclass(frozen=True, slots=True)
class Micro:
    """One padded micro-batch of B samples: S tokens wide, T response tokens wide, n response tokens in all.

    tokens: int64 [B, S]. The n response tokens in sample order: `row` and `column` (int64 [n]) place them in [B, T],
    `position` is where in [0, S) the network predicts them, `target` is the token. `fields` is what a loss function
    sees: `response_mask` and `loss_mask` (bool [B, T]), every other token array as float32 [B, T] with 0 as padding,
    every sample array as [B], the lengths as int64 [B]. `first_token`: index of its first response token in the batch.
    `idle` marks a stand-in for a data-parallel rank without samples: computed so that ranks stay in step, never used.
    """

    tokens: Tensor
    row: Tensor
    column: Tensor
    position: Tensor
    target: Tensor
    fields: dict[str, Tensor]
    first_token: int
    idle: bool

    def pad(self, values: Tensor) -> Tensor:
        """[n] -> [B, T], 0 where there is no response token; differentiable."""
        shape = self.fields["response_mask"].shape
        return values.new_zeros(shape).index_put((self.row, self.column), values)


def micro_batches(
    batch: Batch, start: int, stop: int, size: int, *, multiple: int, device: torch.device
) -> list[Micro]:
    """Samples [start, stop) of a checked batch in micro-batches of at most `size`, at least one.

    The width S is rounded up to `multiple`, which tensor and context parallelism need to cut it.
    """
    if start == stop:
        return [_micro(batch, 0, 1, multiple, device, idle=True)]
    return [
        _micro(batch, first, min(first + size, stop), multiple, device, idle=False)
        for first in range(start, stop, size)
    ]


def _micro(batch: Batch, start: int, stop: int, multiple: int, device: torch.device, *, idle: bool) -> Micro:
    part = select(batch, start, stop)
    prompts, responses = part["prompt_lens"].astype(np.int64), part["response_lens"].astype(np.int64)
    lens = prompts + responses
    samples, width = stop - start, -(-int(lens.max()) // multiple) * multiple
    tokens = np.zeros((samples, width), np.int64)
    tokens[np.arange(width) < lens[:, None]] = part["tokens"]
    row, column = _places(responses)
    position = prompts[row] + column - 1
    fields: dict[str, np.ndarray] = {"prompt_lens": prompts, "response_lens": responses}
    shape = (samples, max(int(responses.max()), 1))
    fields["response_mask"] = np.arange(shape[1]) < responses[:, None]
    for name, array in part.items():
        if name in TOKEN_ARRAYS:
            padded = np.zeros(shape, bool if name == "loss_mask" else np.float32)
            padded[row, column] = array
            fields[name] = padded
        elif name in SAMPLE_ARRAYS:
            fields[name] = array
    return Micro(
        tokens=_tensor(tokens, device),
        row=_tensor(row, device),
        column=_tensor(column, device),
        position=_tensor(position, device),
        target=_tensor(tokens[row, position + 1], device),
        fields={name: _tensor(array, device) for name, array in fields.items()},
        first_token=int(batch["response_lens"][:start].sum()),
        idle=idle,
    )


def _places(lens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    row = np.repeat(np.arange(len(lens)), lens)
    return row, np.arange(len(row)) - np.repeat(_offsets(lens)[:-1], lens)


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    # Received arrays are read-only views of a message's frame; the network gets its own memory.
    return torch.tensor(array, device=device)
