"""What a Hugging Face checkpoint holds, read from its safetensors headers without torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from relax.weights.errors import WeightError

if TYPE_CHECKING:
    import torch


def checkpoint_shapes(checkpoint: Path | str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a published version of this model must have.

    That is what the files hold, less `lm_head.weight` where the configuration ties it to the embeddings and less rotary
    buffers, which are computed. Raises `WeightError` when there is nothing to read.
    """
    root = Path(checkpoint)
    files = sorted(root.glob("*.safetensors"))
    if not files:
        raise WeightError(f"{root} holds no .safetensors file; Relax reads weights in no other format")
    config = root / "config.json"
    tied = config.exists() and json.loads(config.read_text()).get("tie_word_embeddings", False)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        for name, entry in _header(file).items():
            computed = name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
            if name != "__metadata__" and not computed:
                shapes[name] = tuple(entry["shape"])
    return shapes


def checkpoint_tensors(checkpoint: Path | str) -> Iterator[tuple[str, "torch.Tensor"]]:
    """(name, tensor) of what `checkpoint_shapes` lists, one in memory at a time."""
    from safetensors import safe_open

    wanted = checkpoint_shapes(checkpoint)
    for file in sorted(Path(checkpoint).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                if name in wanted:
                    yield name, tensors.get_tensor(name)


def _header(file: Path) -> dict[str, dict]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length < file.stat().st_size:
            raise WeightError(f"{file} is not a safetensors file: its header claims {length} bytes")
        return json.loads(stream.read(length))
