"""Manifests: which bytes make up one version of the weights.

A manifest lists every tensor under its Hugging Face name with the digests of its chunks. It is all that travels through
mailboxes and the run directory; the bytes themselves stay in the shared memory of each node.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from relax.weights.errors import NameMismatch, WeightError

MAX_CHUNK = 16 * 2**20
"""Largest chunk in bytes: one multipart frame between nodes, and what a node fetches again after a bad digest."""

ALIGNMENT = 64
"""Every tensor starts at a multiple of this many bytes (a cache line, and more than any dtype needs)."""

ITEM_SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes per element of every dtype a manifest may name (torch's names)."""

_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True, config=_STRICT)
class WeightTag:
    """Names one published version of the weights.

    `version` counts finished batches, `step` optimizer steps; `digest` (xxh3_128 over names, dtypes, shapes and chunk
    digests) is equal for equal weights, whatever their version; `bytes` is the sum over tensors; `created_at` is in
    seconds since the epoch, UTC.
    """

    run_id: str
    lineage: int
    version: int
    step: int
    digest: str
    bytes: int
    created_at: float

    @property
    def order(self) -> tuple[int, int]:
        """(lineage, version): later weights compare greater."""
        return self.lineage, self.version

    def __str__(self) -> str:
        return f"weights {self.lineage}.{self.version} of run {self.run_id} ({self.digest[:8]})"


@dataclass(frozen=True, slots=True, config=_STRICT)
class Chunk:
    """At most `MAX_CHUNK` bytes of one tensor. `offset` counts bytes from the start of the version's image."""

    digest: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True, config=_STRICT)
class TensorEntry:
    """One tensor, contiguous in the image: its chunks follow each other without gaps."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]

    @property
    def offset(self) -> int:
        """Where the tensor starts in the image; 0 for a tensor without elements."""
        return self.chunks[0].offset if self.chunks else 0


@dataclass(frozen=True, slots=True, config=_STRICT)
class Manifest:
    """A tag and the tensors it stands for, in the order in which they were published."""

    tag: WeightTag
    tensors: tuple[TensorEntry, ...]

    @property
    def image_bytes(self) -> int:
        """Length of the version's image, alignment gaps included."""
        return max((t.offset + t.size for t in self.tensors), default=0)

    def chunks(self) -> Iterable[Chunk]:
        for tensor in self.tensors:
            yield from tensor.chunks

    def to_json(self) -> bytes:
        return _ADAPTER.dump_json(self)

    @classmethod
    def from_json(cls, text: bytes | str, source: str = "a peer") -> "Manifest":
        """Parse and check. `source` (a path or a peer) is named in the error. Raises `WeightError`."""
        try:
            manifest = _ADAPTER.validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the document"
            raise WeightError(f"weight manifest from {source}: {where}: {first['msg']}") from None
        manifest.check(source)
        return manifest

    def save(self, path: Path) -> None:
        """Write so that a reader sees the whole file or none."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.write_bytes(self.to_json())
        aside.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        return cls.from_json(path.read_bytes(), str(path))

    def check(self, source: str) -> None:
        """Refuse a manifest that contradicts itself. Raises `WeightError` naming `source` and the tensor."""
        names: set[str] = set()
        end = 0
        for tensor in self.tensors:
            where = f"weight manifest from {source}: tensor {tensor.name!r}"
            if tensor.name in names:
                raise WeightError(f"{where} is listed twice")
            names.add(tensor.name)
            if tensor.dtype not in ITEM_SIZES:
                raise WeightError(f"{where} has unknown dtype {tensor.dtype!r}; known: {', '.join(ITEM_SIZES)}")
            if any(n < 0 for n in tensor.shape):
                raise WeightError(f"{where} has a negative size in its shape {tensor.shape}")
            if sum(c.size for c in tensor.chunks) != tensor.size:
                raise WeightError(
                    f"{where}: its chunks hold {sum(c.size for c in tensor.chunks)} bytes, "
                    f"{tensor.dtype} {tensor.shape} needs {tensor.size}"
                )
            for number, chunk in enumerate(tensor.chunks):
                if not re.fullmatch("[0-9a-f]{32}", chunk.digest):
                    raise WeightError(f"{where}: chunk {number} has digest {chunk.digest!r}, not 32 hex digits")
                if not 0 < chunk.size <= MAX_CHUNK:
                    raise WeightError(f"{where}: chunk {number} has {chunk.size} bytes, allowed are 1 to {MAX_CHUNK}")
                starts_right = chunk.offset == end if number else chunk.offset >= end and chunk.offset % ALIGNMENT == 0
                if not starts_right:
                    raise WeightError(f"{where}: chunk {number} at {chunk.offset} overlaps or leaves a gap at {end}")
                end = chunk.offset + chunk.size
        if (total := sum(t.size for t in self.tensors)) != self.tag.bytes:
            raise WeightError(
                f"weight manifest from {source}: the tag says {self.tag.bytes} bytes, tensors have {total}"
            )
        if (digest := set_digest(self.tensors)) != self.tag.digest:
            raise WeightError(f"weight manifest from {source}: the tag's digest is {self.tag.digest}, not {digest}")


_ADAPTER: TypeAdapter[Manifest] = TypeAdapter(Manifest)

Shapes = Mapping[str, tuple[int, ...]]


def chunk_digest(data: bytes | memoryview) -> str:
    """xxh3_128: guards against accidents, not against an adversary (peers are authenticated by the transport)."""
    return xxhash.xxh3_128_hexdigest(data)


def set_digest(tensors: Iterable[TensorEntry]) -> str:
    """Digest of a whole set: equal exactly when names, dtypes, shapes, order and bytes are."""
    state = xxhash.xxh3_128()
    for tensor in tensors:
        shape = ",".join(map(str, tensor.shape))
        state.update("\0".join([tensor.name, tensor.dtype, shape, *(c.digest for c in tensor.chunks), "\n"]).encode())
    return state.hexdigest()


def check_names(seen: Shapes, expected: Shapes, what: str) -> None:
    """Refuse a set whose names or shapes are not exactly the expected ones. Raises `NameMismatch` listing them."""
    missing = [name for name in expected if name not in seen]
    unexpected = [name for name in seen if name not in expected]
    reshaped = [
        f"{name} {tuple(seen[name])} instead of {tuple(expected[name])}"
        for name in seen
        if name in expected and tuple(seen[name]) != tuple(expected[name])
    ]
    parts = [
        f"{label}: {_some(names)}"
        for label, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
        if names
    ]
    if parts:
        raise NameMismatch(f"{what} refused, nothing was changed: {'; '.join(parts)}")


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
