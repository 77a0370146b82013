"""End to end: how much of what generation and training can gain by going on at once is reached, with the real parts.

    .venv/bin/python benchmarks/pipeline.py [--batches 20] [--keep DIRECTORY]

Two runs of the same settings, vLLM on one core and the actor on another: lockstep (S = 0) and asynchronous (S = 2).
From their metrics and ledgers, less the first and the last batches:

- a, seconds that the groups of a batch take in lockstep, from the issue of the first until the last is sampled
- b, seconds that the actor then takes to train on it
- the bound (a + b) / max(a, b): what lockstep would gain if the shorter of them, and all in between, cost no time
- the speed-up: seconds of a batch in lockstep over those of the asynchronous run, and its share of the bound
- how long the trainer waits for a publication, and one copy of as many bytes as the weights have

The model is untrained and hardly learns: only the times count. Takes about four minutes on two cores that are idle.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from relax.ledger import queries
from relax.metrics.history import read_rows

ROOT = Path(__file__).resolve().parents[1]
WARM_UP, COOL_DOWN = 5, 3  # batches: the pipeline fills, and it runs empty
GOAL = 0.85  # of the bound
STALENESS = 2

MODEL = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
OPTIONS: dict[str, Any] = {
    "input_key": "prompt",
    "label_key": "answer",
    "rm_type": "exact_match",
    "rollout_batch_size": 6,
    "n_samples_per_prompt": 8,
    "rollout_max_prompt_len": 16,
    "rollout_max_response_len": 80,
    "rollout_max_num_seqs": 192,
    "micro_batch_size": 16,
    "lr": 1e-6,
    # The same correction in both runs; in lockstep it does nothing.
    "use_rollout_logprobs": True,
}


@dataclass(frozen=True)
class Run:
    """Mean seconds a batch: in all, its groups being sampled (of a batch ahead, with others), the actor training and
    either side waiting."""

    batch: float
    sampling: float
    training: float
    waits: dict[str, float]
    publication: list[float]  # waits of the trainer, seconds, one a batch
    bytes: int  # of the weights

    @classmethod
    def read(cls, directory: Path) -> "Run":
        rows = read_rows(directory / "metrics.jsonl")[WARM_UP:-COOL_DOWN]

        def mean(name: str) -> float:
            return statistics.fmean(row[name] for row in rows if row.get(name) is not None)

        waits = {name: mean(name) for name in sorted(rows[0]) if "_wait_s/" in name}
        with queries.read(directory / "ledger.sqlite") as ledger:
            spans = ledger.execute(
                "SELECT max(sampled_at) - min(first_issued_at) FROM groups WHERE state = 'trained' GROUP BY batch"
            ).fetchall()
        manifest = json.loads((directory / "weights" / "0.0.json").read_text())
        return cls(
            batch=mean("perf/batch_s"),
            sampling=statistics.fmean(span for (span,) in spans[WARM_UP:-COOL_DOWN]),
            training=mean("perf/train_s"),
            waits=waits | {"perf/publish_s": mean("perf/publish_s")},
            publication=[row["perf/trainer_wait_s/publication"] for row in rows],
            bytes=manifest["tag"]["bytes"],
        )


def assets(folder: Path) -> dict[str, str]:
    """A model, its tokenizer and prompts."""
    sys.path.insert(0, str(ROOT / "examples" / "demo"))
    import torch
    from model import BOS, EOS, PAD, VOCABULARY, build_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    tokens = {"vocab_size": len(VOCABULARY), "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    config = Qwen3Config(**MODEL, **tokens, tie_word_embeddings=True, dtype="float32")
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    rng = np.random.default_rng(1)
    words = ("".join(map(chr, rng.integers(ord("a"), ord("z") + 1, 12))) for _ in range(512))
    lines = (json.dumps({"prompt": word, "answer": word[::-1]}) for word in words)
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return {"hf_checkpoint": str(folder / "model"), "prompt_data": str(folder / "train.jsonl")}


def launch(folder: Path, made: dict[str, str], staleness: int, batches: int) -> Run:
    """One run from start to end. Raises CalledProcessError, its output shown, when it fails."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    services: dict[str, Any] = {role: {} for role in ("controller", "reward", "advantages")}
    services |= {"rollout": {"cores": [first]}, "actor": {"cores": [second]}}
    options = OPTIONS | made | {"max_staleness": staleness, "num_rollout": WARM_UP + batches + COOL_DOWN}
    topology, directory = folder / f"{staleness}.yaml", folder / f"staleness-{staleness}"
    topology.write_text(yaml.safe_dump({"services": services, "options": options}))
    command = [sys.executable, ROOT / "bin" / "relax-launch", topology, "--run-dir", directory]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()
    return Run.read(directory)


def copy_seconds(size: int) -> float:
    """One copy of `size` bytes into memory whose pages are there; median of 21."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    times = []
    for _ in range(22):
        started = time.perf_counter()
        target[:] = source
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def report(lockstep: Run, ahead: Run) -> None:
    a, b = lockstep.sampling, lockstep.training
    bound, gained = (a + b) / max(a, b), lockstep.batch / ahead.batch
    print(f"a = {a:.3f} s sampling, b = {b:.3f} s training a batch, in lockstep: bound {bound:.3f}")
    print(f"a batch takes {lockstep.batch:.3f} s in lockstep, {ahead.batch:.3f} s with S = {STALENESS}: {gained:.3f}x")
    print(f"share of the bound {gained / bound:.3f} (goal {GOAL})\n")
    print(f"| seconds a batch | lockstep | S = {STALENESS} |\n|---|---|---|")
    rows = {"issue to last sample": (lockstep.sampling, ahead.sampling)}
    rows["training"] = lockstep.training, ahead.training
    rows |= {name: (lockstep.waits[name], ahead.waits[name]) for name in lockstep.waits}
    for name, (before, after) in rows.items():
        print(f"| {name} | {before:.4f} | {after:.4f} |")
    copy = copy_seconds(ahead.bytes)
    middle, worst = statistics.median(ahead.publication), max(ahead.publication)
    print(
        f"\nThe trainer waits {1e3 * middle:.1f} ms for a publication of {ahead.bytes / 2**20:.1f} MiB (worst "
        f"{1e3 * worst:.1f} ms); one copy of as many bytes takes {1e3 * copy:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Lockstep and asynchronous, end to end.")
    parser.add_argument("--batches", type=int, default=20, help="measured batches of each run")
    parser.add_argument("--keep", type=Path, help="a new directory for the runs; otherwise they are removed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if arguments.keep is not None:
            folder = arguments.keep.resolve()
            folder.mkdir(parents=True)
        made = assets(folder)
        lockstep = launch(folder, made, 0, arguments.batches)
        report(lockstep, launch(folder, made, STALENESS, arguments.batches))


if __name__ == "__main__":
    main()
