"""Tiny Hugging Face checkpoints, options and random batches for the tests of relax.megatron, also inside torchrun."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from relax.config.options import Options

_SIZE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

VOCAB = 131  # odd, so that two tensor-parallel ranks need padding


def config(kind: str, **changes: Any) -> PretrainedConfig:
    """The config of one kind of model; the heads of qwen3 are wider than hidden size / heads."""
    size = {**_SIZE, "vocab_size": VOCAB, **changes}
    match kind:
        case "llama":
            return LlamaConfig(**size)
        case "llama-tied":
            return LlamaConfig(**size, tie_word_embeddings=True)
        case "llama3-rope":
            return LlamaConfig(**{**size, "max_position_embeddings": 16384}, rope_parameters=_LLAMA3_ROPE)
        case "qwen2":
            return Qwen2Config(**size)
        case "qwen3":
            return Qwen3Config(**size, head_dim=32)
        case "qwen3-tied":
            return Qwen3Config(**size, head_dim=32, tie_word_embeddings=True)
    raise ValueError(kind)


def save(path: Path, kind: str = "qwen3", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Writes a checkpoint with norms and biases away from their trivial start; returns the model, float32, eval."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(kind, **changes), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    model.save_pretrained(path)
    return model


def options(**changes: Any) -> Options:
    """The run's options, with rates and sizes for a tiny model."""
    return Options(**{"micro_batch_size": 4, "lr": 1e-3, "critic_lr": 2e-3, **changes})


def batch(seed: int = 0, samples: int = 8, prompt: int = 9, response: int = 12) -> dict[str, np.ndarray]:
    """A ragged batch with unequal lengths and masked tokens; sample 1 has an empty response."""
    rng = np.random.default_rng(seed)
    prompt_lens = rng.integers(1, prompt + 1, samples).astype(np.int32)
    response_lens = rng.integers(1, response + 1, samples).astype(np.int32)
    response_lens[1] = 0
    tokens = int(response_lens.sum())
    return {
        "tokens": rng.integers(0, VOCAB, int(prompt_lens.sum()) + tokens).astype(np.int32),
        "prompt_lens": prompt_lens,
        "response_lens": response_lens,
        "loss_mask": (rng.random(tokens) < 0.8).astype(np.uint8),
        "behaviour_logprobs": rng.normal(-5, 0.3, tokens).astype(np.float32),
        "advantages": rng.normal(0, 1, tokens).astype(np.float32),
        "rewards": rng.random(samples),
        "group_ids": np.repeat(np.arange(-(-samples // 4)), 4)[:samples].astype(np.int64),
        "runs": np.stack([np.arange(samples), np.zeros(samples), response_lens], 1).astype(np.int64),
    }
