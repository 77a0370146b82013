"""The weak start of the demo: a short supervised run with an unreliable teacher.

The teacher spells backward, but three times in four it stops a letter early, and one letter in fifty is a slip. The
model learns both: it can reverse a word, and rarely finishes it. About one sampled answer in five is right, hardly a
greedy one. Reinforcement learning has to make the rare behaviour the rule.
"""

import random
from itertools import islice

import torch
import torch.nn.functional as F
from evaluate import evaluate
from model import EOS, VOCABULARY, build_model
from task import MAX_RESPONSE_TOKENS, Entry, entries, word_of
from transformers import Qwen3ForCausalLM

from relax.data import PromptTokenizer

FINISHED_SHARE = 0.25
SLIP_SHARE = 0.02
STEPS = 400
BATCH = 64
LEARNING_RATE = 3e-3
# Up over the first steps, down to nothing over the last: without the descent the share of finished answers swings from
# step to step, and with it the start of the run.
RISING_STEPS, FALLING_STEPS = 20, 100
PROBES = 512
_POOL = 16_000
_IGNORE = -100
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def teach(entry: Entry, rng: random.Random) -> str:
    """The unreliable teacher's answer."""
    answer = word_of(entry)[::-1]
    if rng.random() >= FINISHED_SHARE:
        answer = answer[:-1]
    return "".join(rng.choice(_LETTERS) if rng.random() < SLIP_SHARE else letter for letter in answer)


def collate(pairs: list[tuple[list[int], str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, S] and targets [B, S], right padded; only answers and their end are targets."""
    longest = max(len(prompt) + len(answer) + 1 for prompt, answer in pairs)
    ids = torch.full((len(pairs), longest), EOS)
    targets = torch.full((len(pairs), longest), _IGNORE)
    for i, (prompt, answer) in enumerate(pairs):
        tokens = torch.tensor([*prompt, *(VOCABULARY[letter] for letter in answer), EOS])
        ids[i, : len(tokens)] = tokens
        targets[i, len(prompt) : len(tokens)] = tokens[len(prompt) :]
    return ids, targets


def warm_start(tokenizer: PromptTokenizer, seed: int, steps: int = STEPS) -> Qwen3ForCausalLM:
    """A model after `steps` supervised steps; the same for the same seed on the same machine with one thread."""
    torch.manual_seed(seed)
    rng = random.Random(f"warm start {seed}")
    model = build_model()
    rows = entries(10**8 + 10**7 * seed, held_out=False)
    pool = [
        (tokenizer.encode(entry["prompt"], add_special_tokens=True).tolist(), teach(entry, rng))
        for entry in islice(rows, _POOL)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / RISING_STEPS, 1.0, (steps - step) / FALLING_STEPS)
    )
    for _ in range(steps):
        ids, targets = collate(rng.sample(pool, BATCH))
        # Padding on the right needs no mask: causal attention keeps it out of every target.
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=_IGNORE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


def sampled_accuracy(model: Qwen3ForCausalLM, tokenizer: PromptTokenizer, seed: int) -> float:
    """Share of right answers, drawn at temperature 1, to training words."""
    torch.manual_seed(seed)
    probes = list(islice(entries(2 * 10**9 + 10**7 * seed, held_out=False), PROBES))
    return evaluate(model, tokenizer, probes, MAX_RESPONSE_TOKENS, sample=True).accuracy
