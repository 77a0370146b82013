#!/usr/bin/env python
"""Greedy accuracy of a Hugging Face model on held-out prompts, with transformers alone: no part of Relax samples here.

    evaluate.py CHECKPOINT PROMPTS.jsonl [--count 200]

Scores are exact: 1 where the task's own scorer gives exactly 1.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from relax.data import PromptTokenizer, tokenize
from relax.rewards import VerifierSpec
from relax.rewards.verifiers import build


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`responses` and `rewards` are in the order of the prompts; accuracy is the mean reward."""

    prompts: list[str]
    responses: list[str]
    rewards: list[float]

    @property
    def accuracy(self) -> float:
        return sum(self.rewards) / len(self.rewards)


def read_rows(path: Path, count: int | None = None) -> list[dict[str, Any]]:
    """The first `count` rows of a JSONL file."""
    with path.open() as lines:
        return [json.loads(line) for line in islice(lines, count)]


@torch.inference_mode()
def respond(
    model: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int, *, sample: bool = False, batch: int = 64
) -> list[list[int]]:
    """One response per prompt (token ids, the end token excluded): greedy, or drawn at temperature 1.

    Only prompts of one length share a batch, so nothing is padded and a response does not depend on its neighbours.
    """
    ends = model.config.eos_token_id
    eos = ends if isinstance(ends, list) else [ends]
    settings = GenerationConfig(
        do_sample=sample,
        top_k=0 if sample else None,
        top_p=1.0 if sample else None,
        temperature=1.0 if sample else None,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos,
        pad_token_id=eos[0],
    )
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, prompt in enumerate(prompts):
        by_length[len(prompt)].append(i)
    responses: list[list[int]] = [[] for _ in prompts]
    for length, members in by_length.items():
        for start in range(0, len(members), batch):
            part = members[start : start + batch]
            ids = torch.tensor([prompts[i] for i in part])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
            for i, row in zip(part, out[:, length:].tolist(), strict=True):
                stop = next((n for n, token in enumerate(row) if token in eos), len(row))
                responses[i] = row[:stop]
    return responses


def evaluate(
    model: PreTrainedModel,
    tokenizer: PromptTokenizer,
    rows: list[dict[str, Any]],
    max_new_tokens: int,
    *,
    sample: bool = False,
    apply_chat_template: bool = False,
) -> Evaluation:
    """Responses of `model` to `rows` (reasoning-gym entries with a `prompt`), and their exact rewards."""
    verifier = build(VerifierSpec("reasoning_gym", exact=True))
    prompts = [tokenize(tokenizer, row, input_key="prompt", apply_chat_template=apply_chat_template) for row in rows]
    ids = respond(model, [prompt.token_ids.tolist() for prompt in prompts], max_new_tokens, sample=sample)
    texts = [tokenizer.decode(response) for response in ids]
    rewards = [
        float(verifier(prompt.text, text, None, row) or 0.0)
        for prompt, text, row in zip(prompts, texts, rows, strict=True)
    ]
    return Evaluation([prompt.text for prompt in prompts], texts, rewards)


def evaluate_checkpoint(
    checkpoint: Path, rows: list[dict[str, Any]], max_new_tokens: int, **settings: Any
) -> Evaluation:
    """`evaluate` for a model directory, in float32."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True).eval()
    return evaluate(model, PromptTokenizer(checkpoint), rows, max_new_tokens, **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description="Greedy accuracy of a model on held-out prompts.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=7)
    parser.add_argument("--apply-chat-template", action="store_true")
    arguments = parser.parse_args()
    result = evaluate_checkpoint(
        arguments.checkpoint,
        read_rows(arguments.prompts, arguments.count),
        arguments.max_new_tokens,
        apply_chat_template=arguments.apply_chat_template,
    )
    for prompt, response, reward in islice(zip(result.prompts, result.responses, result.rewards, strict=True), 8):
        print(f"{prompt!r} -> {response!r}  {reward:.0f}")
    print(json.dumps({"count": len(result.rewards), "accuracy": round(result.accuracy, 4)}))


if __name__ == "__main__":
    main()
