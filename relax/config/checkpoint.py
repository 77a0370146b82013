"""A Hugging Face checkpoint as its directory shows it: what makes it unusable, found by reading JSON alone.

Imports no torch and reads no weight; of a safetensors file only the header: 8 bytes of little-endian length, then JSON.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
EMBEDDING = "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"
# A safetensors header longer than this is no header (the format's own limit).
LONGEST_HEADER = 100 * 10**6
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
SHOWN = 3
AGAIN = "Download the model again."

Shapes = dict[str, tuple[int, ...]]


class BrokenFileError(ValueError):
    """What is wrong with a file, to be said after its name."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What could be read: `faults` are (problem, fix), `config` is config.json (None: not usable), `shapes` those of
    every tensor in the files (None: incomplete)."""

    faults: list[tuple[str, str]] = field(default_factory=list)
    config: dict[str, Any] | None = None
    shapes: Shapes | None = None

    @property
    def elements(self) -> int | None:
        """Number of weights, None when they are incomplete."""
        return None if self.shapes is None else sum(prod(shape) for shape in self.shapes.values())


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads the configuration and the headers of the weights in `folder`. Never raises for a fault of theirs."""
    config, faults = read_config(folder)
    if config is None:
        return Checkpoint(faults)
    shapes, broken = _read_shapes(folder)
    if shapes is not None:
        broken += _contradictions(config, shapes)
    return Checkpoint([*faults, *broken], config, None if broken else shapes)


def read_config(folder: Path) -> tuple[dict[str, Any] | None, list[tuple[str, str]]]:
    """config.json, or None and the one fault (problem, fix) that makes it unusable."""
    try:
        there = "" if folder.is_dir() else "is a file" if folder.is_file() else "does not exist"
    except OSError as error:  # a name that is too long
        there = f"cannot be looked up, {error.strerror}"
    if there:
        fix = f"Name the directory of a Hugging Face model; relative paths start at {Path.cwd()}."
        return None, [(f"{there}: {folder.absolute()}", fix)]
    file = folder / "config.json"
    if not file.is_file():
        return None, [("has no config.json", "Name the directory that holds it, or download the whole model.")]
    try:
        config = read_object(file)
    except BrokenFileError as error:
        return None, [(f"its config.json {error}", AGAIN)]
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        fix = f"It must be a list, e.g. {json.dumps([ARCHITECTURES[0]])}; mend {file} or download the model again."
        return None, [(f"its config.json has architectures = {architectures!r}", fix)]
    if not any(known in ARCHITECTURES for known in architectures):
        named = ", ".join(map(str, architectures)) or "none"
        return None, [(f"its architecture is {named}", f"Relax trains {', '.join(ARCHITECTURES)}.")]
    for name in (*SIZES, *OPTIONAL_SIZES):
        size = config.get(name)
        absent = name not in config or (size is None and name in OPTIONAL_SIZES)
        if not absent and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            fix = f"It must be a whole number above 0; mend {file} or download the model again."
            return None, [(f"its config.json has {name} = {size!r}", fix)]
    return config, []


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises BrokenFileError."""
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise BrokenFileError(f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BrokenFileError(f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise BrokenFileError("holds no object")
    return value


def _read_shapes(folder: Path) -> tuple[Shapes | None, list[tuple[str, str]]]:
    files = sorted(folder.glob("*.safetensors"))
    missing = list(_missing_shards(folder, {file.name for file in files}))
    if missing:
        return None, missing
    if not files:
        return None, [("has no weights (*.safetensors)", "Save the model with safe_serialization=True.")]
    shapes: Shapes = {}
    faults = []
    for file in files:
        try:
            shapes |= read_header(file)
        except BrokenFileError as error:
            faults.append((f"{file} is no complete safetensors file: {error}", "Download it again."))
    if not faults and not shapes:
        faults = [(f"its weights hold no tensor ({_some([file.name for file in files])})", AGAIN)]
    elif not faults:
        faults = list(_not_as_indexed(folder, shapes))
    return (None if faults else shapes), faults


def _missing_shards(folder: Path, present: set[str]) -> Iterator[tuple[str, str]]:
    """Shards that the index names, or that the names of others promise (`-00001-of-00003`)."""
    promised = {
        f"{match[1]}-{n:05d}-of-{match[3]}.safetensors"
        for match in map(SHARD.fullmatch, present)
        if match
        for n in range(1, int(match[3]) + 1)
    }
    by = "the number of shards in their names"
    if (folder / INDEX).is_file():
        try:
            promised, by = set(_weight_map(folder).values()), str(folder / INDEX)
        except BrokenFileError as error:
            yield f"{folder / INDEX} {error}", "Download it again."
            return
    if missing := sorted(promised - present):
        yield f"misses {_some(missing)} of its weights, by {by}", "Download the missing files; it has only a part."


def _not_as_indexed(folder: Path, shapes: Shapes) -> Iterator[tuple[str, str]]:
    if (folder / INDEX).is_file() and (missing := sorted(_weight_map(folder).keys() - shapes.keys())):
        yield f"its weights have no {_some(missing)}, which {folder / INDEX} names", AGAIN


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor -> shard, by the index. Raises BrokenFileError."""
    shards = read_object(folder / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise BrokenFileError("has no weight_map from tensors to files")
    return shards


def _contradictions(config: Mapping[str, Any], shapes: Shapes) -> list[tuple[str, str]]:
    """What the configuration says of the embeddings against their shape."""
    shape = shapes.get(EMBEDDING)
    if shape is None:
        return [(f"its weights have no {EMBEDDING}", "Save the whole model, under the names transformers gives it.")]
    said = {name: config.get(name) for name in ("vocab_size", "hidden_size")}
    if len(shape) == 2 and all(count in (None, size) for count, size in zip(said.values(), shape, strict=True)):
        return []
    told = " and ".join(f"{name} = {count}" for name, count in said.items())
    problem = f"its config.json says {told}, but {EMBEDDING} has the shape {list(shape)}"
    return [(problem, "Take config.json and weights from the same model.")]


def read_header(file: Path) -> Shapes:
    """Tensor -> shape of a safetensors file, checked against the size of the file. Raises BrokenFileError."""
    try:
        whole = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            raw = opened.read(length) if 2 <= length <= min(LONGEST_HEADER, whole) else b""
    except OSError as error:
        raise BrokenFileError(f"cannot be read: {error.strerror}") from None
    if len(raw) != length or not raw:
        raise BrokenFileError(f"its {whole} bytes do not hold the header")
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise BrokenFileError("its header is no JSON") from None
    if not isinstance(header, dict):
        raise BrokenFileError("its header holds no object")
    shapes: Shapes = {}
    end = 0
    for name, entry in header.items():
        if name != "__metadata__":
            shapes[name], last = _entry(name, entry)
            end = max(end, last)
    if whole != 8 + length + end:
        raise BrokenFileError(f"it has {whole} bytes, its header tells of {8 + length + end}")
    return shapes


def _entry(name: str, entry: Any) -> tuple[tuple[int, ...], int]:
    """(shape, end of the data) of one tensor."""
    described = entry if isinstance(entry, dict) else {}
    shape, offsets = described.get("shape"), described.get("data_offsets")
    if not (_counts(shape) and _counts(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
        raise BrokenFileError(f"its header has no shape and place of {name}")
    item = ITEM_BYTES.get(str(described.get("dtype")))
    if item is not None and prod(shape) * item != offsets[1] - offsets[0]:
        raise BrokenFileError(f"{name} of shape {shape} takes {offsets[1] - offsets[0]} bytes there")
    return tuple(shape), offsets[1]


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _some(names: list[str]) -> str:
    """At most a few of the names, and how many there are more."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
