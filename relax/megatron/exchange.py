"""Rank 0 tells the other ranks what to do: a JSON header and numpy arrays, never a pickle."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from relax.megatron import cpu

_ALIGN = 16
_KINDS = "iufb"


class InStepError(Exception):
    """Raised by all ranks at the same place of a command, so that they stay in step: the next command can follow."""


def broadcast(
    header: dict[str, Any] | None,
    arrays: Mapping[str, np.ndarray] | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Any, dict]:
    """Rank 0's (header, arrays) on every rank. Collective over all ranks, in `group` if they have more than one.

    Rank 0 gives a header of JSON values and any number of numpy arrays of numbers; the others give None. Arrays that
    were received are read-only. While rank 0 has nothing to say it should say so now and then, since the others wait no
    longer than the grid's timeout. Raises TypeError on rank 0 for an array that is not of numbers.
    """
    if dist.get_world_size() == 1:
        return header, dict(arrays or {})
    if dist.get_rank() == 0:
        given = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
        text = json.dumps([header, _describe(given)]).encode()
        buffer = np.zeros(_size(given), np.uint8)
        for array, start in zip(given.values(), _starts(given), strict=True):
            buffer[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        _send(np.array([len(text), len(buffer)], np.int64), group)
        _send(np.frombuffer(bytearray(text), np.uint8), group)
        _send(buffer, group)
        return header, given
    text_size, buffer_size = _send(np.zeros(2, np.int64), group)
    header, described = json.loads(_send(np.zeros(text_size, np.uint8), group).tobytes())
    buffer = _send(np.zeros(buffer_size, np.uint8), group)
    buffer.flags.writeable = False
    received, start = {}, 0
    for name, dtype, shape in described:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        received[name] = buffer[start : start + size].view(dtype).reshape(shape)
        start += _padded(size)
    return header, received


def sum_metrics(metrics: Mapping[str, tuple[float, float]], groups: list[Any]) -> dict[str, tuple[float, float]]:
    """(sum, count) of every name added over the ranks of each group in turn; names may differ between ranks.

    Collective over the groups. Sums are float64.
    """
    totals = dict(metrics)
    for group in groups:
        if dist.get_world_size(group) == 1:
            continue
        names = _all_names(sorted(totals), group)
        pairs = torch.tensor([totals.get(name, (0.0, 0.0)) for name in names], dtype=torch.float64)
        pairs = pairs.reshape(len(names), 2).to(cpu.device())
        dist.all_reduce(pairs, group=group)
        totals = {name: (total, count) for name, (total, count) in zip(names, pairs.tolist(), strict=True)}
    return totals


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The JSON values of all ranks of `group`, by rank, on each of them. Collective over the group."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return [value]
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else cpu.device()
    text = json.dumps(value).encode()
    sizes = torch.zeros(ranks, dtype=torch.int64, device=device)
    sizes[dist.get_rank(group)] = len(text)
    dist.all_reduce(sizes, group=group)
    texts = torch.zeros(ranks, int(sizes.max()), dtype=torch.uint8, device=device)
    texts[dist.get_rank(group), : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    dist.all_reduce(texts, group=group)
    rows = texts.cpu().numpy()
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes.tolist(), strict=True)]


def _all_names(names: list[str], group: Any) -> list[str]:
    return sorted({name for theirs in gather(names, group) for name in theirs})


def _describe(arrays: Mapping[str, np.ndarray]) -> list[tuple[str, str, list[int]]]:
    for name, array in arrays.items():
        if array.dtype.kind not in _KINDS:
            raise TypeError(f"array {name!r} has dtype {array.dtype}; only numbers are sent between ranks")
    return [(name, array.dtype.str, list(array.shape)) for name, array in arrays.items()]


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _starts(arrays: Mapping[str, np.ndarray]) -> list[int]:
    return [0, *np.cumsum([_padded(array.nbytes) for array in arrays.values()], dtype=np.int64)][: len(arrays)]


def _size(arrays: Mapping[str, np.ndarray]) -> int:
    return sum(_padded(array.nbytes) for array in arrays.values())


def _send(array: np.ndarray, group: dist.ProcessGroup | None) -> np.ndarray:
    """Rank 0's values in every rank's array of this shape."""
    if array.size == 0:
        return array
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else cpu.device()
    tensor = torch.from_numpy(array).to(device)
    dist.broadcast(tensor, 0, group=group)
    return tensor.cpu().numpy()
