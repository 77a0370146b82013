"""Tiny random models of the supported architectures, written as Hugging Face checkpoints."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

ARCHITECTURES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
VOCAB = 96
EOS = 1
OTHER_EOS = 5


def make_model(directory: Path, *, architecture: str = "qwen3", tied: bool = True, seed: int = 0):
    """Write a checkpoint of about 0.1M parameters and return the model, in fp32."""
    config_class, model_class = ARCHITECTURES[architecture]
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        **({} if architecture == "qwen2" else {"head_dim": 32}),
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=2,
        eos_token_id=EOS,
        pad_token_id=0,
        dtype="float32",
    )
    model = model_class(config).eval()
    change(model, seed)
    model.save_pretrained(directory)
    # A checkpoint's sampling preferences must not reach the engine; its list of end tokens must.
    generation = {"eos_token_id": [EOS, OTHER_EOS], "do_sample": True, "temperature": 0.1, "top_k": 1}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return model


@torch.no_grad()
def change(model: torch.nn.Module, seed: int) -> None:
    """Draw every matrix anew, wide enough that log-probs differ clearly between seeds."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.15)


def published(model: torch.nn.Module):
    """(name, tensor) as a trainer publishes them: a tied head is not listed."""
    tied = model.config.tie_word_embeddings
    return [(n, t) for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")]


@torch.no_grad()
def reference_logprobs(model: torch.nn.Module, prompt, response, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of `response` after `prompt` by transformers, float32 [response tokens]."""
    ids = torch.tensor([[*map(int, prompt), *map(int, response)]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / (temperature or 1.0)
    return logits.log_softmax(-1)[torch.arange(len(response)), ids[0, len(prompt) :].long()]
