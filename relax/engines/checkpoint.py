"""What an engine needs to know about a Hugging Face checkpoint besides its weights; no torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from relax.engines.base import EngineError

CPU_HEAD_DIMS = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
"""Head sizes for which vLLM's CPU build has attention kernels (vllm/v1/attention/backends/cpu_attn.py, 0.32)."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`head_dim` is the width of an attention head, `max_len` the longest sequence in tokens.

    `eos_token_ids` holds every id that ends a response, in increasing order.
    """

    vocab_size: int
    head_dim: int
    max_len: int
    eos_token_ids: tuple[int, ...]


def model_facts(checkpoint: Path | str) -> ModelFacts:
    """Read config.json, generation_config.json and, for want of an end in those, the tokenizer's files.

    A chat model ends at several ids (end of turn, end of text), which only generation_config.json lists. Raises
    `EngineError` when there is no config.json or nothing says where a response ends.
    """
    root = Path(checkpoint)
    if not (root / "config.json").exists():
        raise EngineError(f"--hf-checkpoint {root} holds no config.json; it must be the directory of a model")
    config = _json(root / "config.json")
    eos = _ids(config.get("eos_token_id")) | _ids(_json(root / "generation_config.json").get("eos_token_id"))
    if not eos:
        eos = _tokenizer_eos(root)
    if not eos:
        raise EngineError(
            f"nothing in {root} says which token ends a response: set eos_token_id in config.json or in "
            f"generation_config.json, or eos_token in tokenizer_config.json"
        )
    return ModelFacts(
        vocab_size=config["vocab_size"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        max_len=config.get("max_position_embeddings", 2**31),
        eos_token_ids=tuple(sorted(eos)),
    )


def _tokenizer_eos(root: Path) -> set[int]:
    token = _json(root / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    tokenizer = _json(root / "tokenizer.json")
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])}
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    return _ids(added.get(text, vocabulary.get(text) if isinstance(vocabulary, dict) else None))


def _ids(value: int | list[int] | None) -> set[int]:
    return set() if value is None else {value} if isinstance(value, int) else set(value)


def _json(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}
