"""Shards of tensors in safetensors files, and what any other cut of the same tensors takes from them.

Which rank holds what is described by Megatron-Core's dist_checkpointing: a `ShardedTensor` has a key, the shape of the
whole tensor, this rank's place in it, and is written by one of the ranks that hold the same. That makes a checkpoint
independent of the grid that wrote it. Its storage is not used:

- Its `.metadata` is read by `pickle.load`, which runs whatever a checkpoint from somebody else says.
- It plans a save by sending pickled objects in the process group of training, so it cannot run beside training.
- It forks writers from a process that has threads, and starts a manager process: 7 to 12 s at the first save.

Here each rank writes its shards by itself, and the headers of the files say where everything is.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    apply_factories,
    is_main_replica,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor

from relax.checkpoints.parts import File, write_new
from relax.megatron.checkpoint import CheckpointError

_PLACES = "places"  # in the metadata of a file: name -> [key, shape of the whole, offset]
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A rectangle of a whole tensor. `tensor` has as many axes as the whole, and begins at `offset` in it."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor
    main: bool
    """Of the ranks that hold it, this one writes it."""
    padded: bool
    """The whole may have been padded to another size at its first axis."""

    @property
    def name(self) -> str:
        return f"{self.key}@{'.'.join(map(str, self.offset))}"


def shards_of(state: dict[str, Any]) -> list[Shard]:
    """The shards of a sharded state dict, which is changed; their tensors are views of the live ones."""
    apply_factories(state)
    shards = []
    for value in nested_values(state):
        # Layers have a place for what Transformer Engine would keep; without it nothing is there.
        if isinstance(value, ShardedObject) and value.data is not None:
            raise TypeError(f"{value.key} is no tensor; a checkpoint would need pickle for it")
        if isinstance(value, ShardedTensor):
            shards.append(_shard(value))
        elif isinstance(value, Tensor):
            raise TypeError(f"a tensor of shape {tuple(value.shape)} has no place in a whole")
    return shards


def _shard(value: ShardedTensor) -> Shard:
    assert value.data is not None
    return Shard(
        value.key,
        tuple(value.global_shape),
        tuple(value.global_offset),
        value.data.detach()[(None,) * value.prepend_axis_num],
        is_main_replica(value.replica_id),
        value.allow_shape_mismatch,
    )


# --- writing -------------------------------------------------------------------------------------------------------


def write_shards(path: Path, shards: Iterable[Shard]) -> File:
    """Writes shards, whose tensors are in host memory, to a new file; see `write_tensors`."""
    given = list(shards)
    places = {shard.name: [shard.key, shard.whole, shard.offset] for shard in given}
    return write_tensors(path, {shard.name: shard.tensor for shard in given}, {_PLACES: json.dumps(places)})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> File:
    """Writes a new safetensors file; see `write_new`. The tensors are contiguous in host memory."""
    # The widest first: then every tensor begins at a multiple of its width.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    size = 0
    for name, tensor in ordered:
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [size, size + tensor.nbytes],
        }
        size += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = (memoryview(tensor.reshape(-1).view(torch.uint8).numpy()) for _, tensor in ordered)  # type: ignore[arg-type]
    return write_new(path, len(text).to_bytes(8, "little"), text, *data)


# --- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stored:
    path: Path
    name: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


class StoredShards:
    """What a set of files holds, by key; from their headers alone."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Raises CheckpointError for a file that is not of this kind."""
        self._by_key: dict[str, list[_Stored]] = {}
        for path in paths:
            for stored in _read_header(path):
                self._by_key.setdefault(stored[0], []).append(stored[1])

    @property
    def keys(self) -> set[str]:
        return set(self._by_key)

    def check(self, shards: Iterable[Shard]) -> None:
        """Raises CheckpointError naming the first tensor that is missing, incomplete, or of another shape or dtype."""
        for shard in shards:
            pieces = self._by_key.get(shard.key)
            if pieces is None:
                raise CheckpointError(f"the checkpoint has no {shard.key}, which this model needs")
            whole = pieces[0].whole
            fits = len(whole) == len(shard.whole) and whole[shard.padded :] == shard.whole[shard.padded :]
            if not fits or any(piece.whole != whole for piece in pieces):
                raise CheckpointError(
                    f"{pieces[0].path}: {shard.key} has shape {list(whole)}, this model's has {list(shard.whole)}"
                )
            dtype = _DTYPES[shard.tensor.dtype]
            if other := [piece.dtype for piece in pieces if piece.dtype != dtype]:
                raise CheckpointError(
                    f"{pieces[0].path}: {shard.key} is {other[0]}, this model's is {dtype}; see --train-dtype"
                )
            covered = sum(math.prod(high - low for low, high in _overlap(shard, piece)) for piece in pieces)
            wanted = math.prod(
                max(0, min(start + size, end) - start)
                for start, size, end in zip(shard.offset, shard.tensor.shape, whole, strict=True)
            )
            if covered != wanted:
                raise CheckpointError(
                    f"{pieces[0].path.parent}: the files hold {covered} of {wanted} elements of {shard.key}; "
                    "one of them is not of this checkpoint"
                )

    @torch.no_grad()
    def read(self, shards: Iterable[Shard]) -> None:
        """Fills the shards, which were checked, in place; padding that was not stored becomes 0."""
        for shard in shards:
            if shard.padded:
                shard.tensor.zero_()
            for piece in self._by_key[shard.key]:
                ranges = _overlap(shard, piece)
                if not all(low < high for low, high in ranges):
                    continue
                here = tuple(slice(low - o, high - o) for (low, high), o in zip(ranges, shard.offset, strict=True))
                there = tuple(slice(low - o, high - o) for (low, high), o in zip(ranges, piece.offset, strict=True))
                with safe_open(piece.path, framework="pt") as opened:
                    shard.tensor[here].copy_(opened.get_slice(piece.name)[there])


def _overlap(shard: Shard, piece: _Stored) -> list[tuple[int, int]]:
    """For each axis of the whole, from where to where both are; nothing is (n, n)."""
    ranges = []
    for ours, size, theirs, length in zip(shard.offset, shard.tensor.shape, piece.offset, piece.shape, strict=True):
        low, high = max(ours, theirs), min(ours + size, theirs + length)
        ranges.append((low, max(low, high)))
    return ranges


def _read_header(path: Path) -> Sequence[tuple[str, _Stored]]:
    try:
        with safe_open(path, framework="pt") as opened:
            places = json.loads((opened.metadata() or {})[_PLACES])
            found = []
            for name in opened.keys():  # noqa: SIM118 - not a dict
                key, whole, offset = places[name]
                tensor = opened.get_slice(name)
                shape = tuple(tensor.get_shape())
                if not len(whole) == len(offset) == len(shape):
                    raise ValueError(f"{name} has {len(shape)} axes and a place with {len(whole)}")
                found.append((key, _Stored(path, name, tuple(whole), tuple(offset), shape, tensor.get_dtype())))
            return found
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no file of shards: {error!r}") from None
