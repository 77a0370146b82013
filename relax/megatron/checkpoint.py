"""Reading a Hugging Face checkpoint: its architecture and, one at a time, its tensors, from files or from memory."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from transformers import AutoConfig

SUPPORTED = ("llama", "qwen2", "qwen3")
_INDEX = "model.safetensors.index.json"
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the text names the file or key, what it holds, and what would do."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What of a Hugging Face config decides the shape and the mathematics of the network."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    query_groups: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    rope_factor: float | None  # Llama 3's frequency scaling; None: plain RoPE
    max_positions: int


def read_architecture(path: str | Path) -> Architecture:
    """The architecture of the checkpoint in `path`.

    Raises CheckpointError for a missing config, another model type, and any setting that the network would not
    compute as transformers does.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json; --hf-checkpoint must be a Hugging Face model directory")
    model_type = json.loads((path / "config.json").read_text()).get("model_type")
    if model_type not in SUPPORTED:
        raise CheckpointError(
            f"{path / 'config.json'}: model_type {model_type!r}; supported are {', '.join(SUPPORTED)}"
        )
    config = AutoConfig.from_pretrained(path)
    rope = _rope(config, path)
    _refuse_unless(path, config, "hidden_act", "silu")
    _refuse_unless(path, config, "mlp_bias", False)
    _refuse_unless(path, config, "use_sliding_window", False)
    if model_type != "qwen2":
        _refuse_unless(path, config, "attention_bias", False)
    return Architecture(
        model_type=model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        query_groups=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        norm_eps=config.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        rope_factor=rope.get("factor"),
        max_positions=config.max_position_embeddings,
    )


def _refuse_unless(path: Path, config: Any, key: str, value: Any) -> None:
    seen = getattr(config, key, value)
    if seen != value:
        raise CheckpointError(f"{path / 'config.json'}: {key} is {seen!r}; only {value!r} is supported")


def _rope(config: Any, path: Path) -> dict[str, Any]:
    rope = dict(config.rope_parameters)
    kind = rope.get("rope_type", "default")
    where = f"{path / 'config.json'}: rope_parameters"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"{where} rotate a part of each head ({rope}); only the whole head is supported")
    if kind == "default":
        return {"rope_theta": float(rope["rope_theta"])}
    if kind == "llama3" and all(rope.get(key) == value for key, value in _LLAMA3_ROPE.items()):
        return {"rope_theta": float(rope["rope_theta"]), "factor": float(rope["factor"])}
    raise CheckpointError(
        f"{where} are {rope}; supported are rope_type 'default', and 'llama3' with {_LLAMA3_ROPE} and any factor"
    )


class Source(Protocol):
    """Whole tensors under Hugging Face names. `str` of it says where they come from."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, names: Iterable[str]) -> Iterator[torch.Tensor]: ...


class Tensors:
    """The safetensors files of a checkpoint, read one tensor at a time."""

    def __init__(self, path: str | Path) -> None:
        """Raises CheckpointError when there are no safetensors or the index names a missing file."""
        self.path = Path(path)
        index = self.path / _INDEX
        if index.is_file():
            self._files: dict[str, Path] = {
                name: self.path / file for name, file in json.loads(index.read_text())["weight_map"].items()
            }
            if missing := sorted({file.name for file in self._files.values() if not file.is_file()}):
                raise CheckpointError(f"{index} names {', '.join(missing)}, not in {self.path}")
        else:
            files = sorted(self.path.glob("*.safetensors"))
            if not files:
                raise CheckpointError(f"{self.path} has no *.safetensors file; other weight formats are not read")
            self._files = {}
            for file in files:
                with safe_open(file, framework="pt") as opened:
                    self._files.update(dict.fromkeys(opened.keys(), file))

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Read from the files' headers."""
        shapes = {}
        for file in sorted(set(self._files.values())):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    if self._files.get(name) == file:
                        shapes[name] = tuple(opened.get_slice(name).get_shape())
        return shapes

    def read(self, names: Iterable[str]) -> Iterator[torch.Tensor]:
        """The tensors of `names`, in order, as stored."""
        for name in names:
            with safe_open(self._files[name], framework="pt") as opened:
                yield opened.get_tensor(name)


class Held:
    """Tensors in memory, or views of it."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]], origin: str) -> None:
        """`origin` says whose they are, in errors. Raises CheckpointError for a name that comes twice."""
        self.origin = origin
        self._tensors: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            if name in self._tensors:
                raise CheckpointError(f"{origin} hold {name} twice")
            self._tensors[name] = tensor

    def __str__(self) -> str:
        return self.origin

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, names: Iterable[str]) -> Iterator[torch.Tensor]:
        return (self._tensors[name] for name in names)
