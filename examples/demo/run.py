#!/usr/bin/env python
"""The demo from end to end: prepare, train through the whole pipeline, show what was learned.

    run.py [--seed 1] [options of relax-launch ...]

Exits 0 only if the run did. The run directory stays, with metrics.jsonl, logs/ and the trained model in export/.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOPOLOGY = Path(__file__).resolve().parent / "demo.yaml"
EVALUATED = 200
SHOWN = 8
_BARS = " ▁▂▃▄▅▆▇█"

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the demo.", epilog="Other options are those of relax-launch.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, help="default: the next free runs/demo-<n>")
    arguments, rest = parser.parse_known_args()

    from prepare import prepare

    from relax.launch.rundir import numbered

    print(f"preparing the model and the prompts of seed {arguments.seed} (some tens of seconds the first time) ...")
    assets = prepare(arguments.seed)
    print(
        f"  {assets.directory}: the model answers {assets.accuracy:.0%} of its training prompts right when it samples"
    )
    run_dir = arguments.run_dir or numbered(ROOT / "runs", "demo")
    command = [
        str(ROOT / "bin" / "relax-launch"),
        str(TOPOLOGY),
        *("--run-dir", str(run_dir)),
        *("--seed", str(arguments.seed)),
        *("--hf-checkpoint", str(assets.model)),
        *("--prompt-data", str(assets.train)),
        *rest,
    ]
    status = subprocess.run(command, cwd=ROOT).returncode
    if status == 0 and "--dry-run" not in rest:
        _report(run_dir, assets.model, assets.held_out)
    return status


def _report(run_dir: Path, before: Path, held_out: Path) -> None:
    rewards = _rewards(run_dir / "metrics.jsonl")
    print("\nreward, batch by batch (a full block is 1.0)")
    print(f"  {''.join(_BARS[round(reward * (len(_BARS) - 1))] for reward in rewards)}")
    print(f"  first 3 batches {_mean(rewards[:3]):.2f}, last 10 batches {_mean(rewards[-10:]):.2f}")

    from evaluate import evaluate_checkpoint, read_rows
    from task import MAX_RESPONSE_TOKENS

    rows = read_rows(held_out, EVALUATED)
    first, last = (evaluate_checkpoint(model, rows, MAX_RESPONSE_TOKENS) for model in (before, run_dir / "export"))
    print("\nwords it has never seen, greedy, before -> after")
    for prompt, old, new in list(zip(first.prompts, first.responses, last.responses, strict=True))[:SHOWN]:
        print(f"  {prompt.removesuffix('>'):6} {old or '(nothing)':8} -> {new or '(nothing)'}")
    print(f"right on {EVALUATED} of them: {first.accuracy:.1%} -> {last.accuracy:.1%}")
    print(f"\nthe run directory: {run_dir}\nthe trained model: {run_dir / 'export'}")


def _rewards(metrics: Path) -> list[float]:
    """Mean raw reward of every batch, in order; the last row of a step counts."""
    rows = {row["step"]: row for row in map(json.loads, metrics.read_text().splitlines())}
    return [rows[step]["rollout/raw_reward"] for step in sorted(rows)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(main())
