"""Writing a network as a Hugging Face model directory."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from relax.checkpoints.durable import remove, sync
from relax.megatron import exchange
from relax.megatron.language import LanguageNetwork

SHARD_BYTES = 4 << 30

# Tokenizer and generation settings, under every name that tokenizers of the supported models use.
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def save_hf(network: LanguageNetwork, path: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes weights, config and the source checkpoint's tokenizer to `path`, which appears when it is complete.

    Collective; rank 0 writes, to a directory beside, synced and renamed at the end; what a killed one left there is
    removed. Tensors are gathered one at a time; at most `shard_bytes` of them, or one tensor, are held at once. Raises
    FileExistsError, on every rank, when `path` exists.
    """
    writer = dist.get_rank() == 0
    told, _ = exchange.broadcast({"exists": path.exists()} if writer else None)
    if told["exists"]:
        raise FileExistsError(f"{path} exists; a model is exported to a new directory")
    if not writer:
        for _ in network.state():
            pass
        return
    for left in path.parent.glob(f".{path.name}.*.partial"):
        remove(left)
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    aside.mkdir(parents=True)
    _write_weights(network.state(), aside, shard_bytes)
    _write_config(network, aside)
    for name in _COPIED:
        if (network.checkpoint / name).is_file():
            shutil.copyfile(network.checkpoint / name, aside / name)
    for file in aside.iterdir():
        sync(file)
    sync(aside)
    aside.rename(path)
    sync(path.parent)


def _write_weights(tensors: Iterator[tuple[str, Tensor]], path: Path, shard_bytes: int) -> None:
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = size = 0

    def flush() -> None:
        nonlocal held, size
        save_file(held, path / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(held))
        held, size = {}, 0

    for name, tensor in tensors:
        if held and size + tensor.nbytes > shard_bytes:
            flush()
        held[name] = tensor.cpu()
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    # Names tell the number of files, which is known only now.
    count = len(shards)
    if count == 1:
        (path / "0.safetensors").rename(path / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
        (path / f"{index}.safetensors").rename(path / file)
        weight_map |= dict.fromkeys(names, file)
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    (path / "model.safetensors.index.json").write_text(index_text)


def _write_config(network: LanguageNetwork, path: Path) -> None:
    config = json.loads((network.checkpoint / "config.json").read_text())
    dtype = str(network.config.params_dtype).removeprefix("torch.")
    # transformers 5 writes "dtype" and reads both; older readers know "torch_dtype" alone.
    config.pop("dtype", None)
    config["torch_dtype"] = dtype
    config["tie_word_embeddings"] = network.architecture.tied
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
