#!/usr/bin/env python
"""The demo: a weak model learns to spell words backward, through the whole pipeline, on two cores.

    run.py [--seed 1] [options of relax-launch]

Makes the weak model and the prompts (prepare.py), launches demo.yaml, then shows the reward's climb, some answers
before and after, and the greedy accuracy of the exported model on words it has never seen.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from prepare import Assets, prepare
from rich.console import Console
from rich.table import Table

from relax.launch.rundir import numbered
from relax.metrics.history import read_rows

ROOT = Path(__file__).resolve().parents[2]
TOPOLOGY = Path(__file__).resolve().parent / "demo.yaml"
HELD_OUT = 200
SHOWN = 8
BARS = 20


def main() -> int:
    parser = argparse.ArgumentParser(description="A weak model learns to spell words backward.")
    parser.add_argument("--seed", type=int, default=1, help="seed of the model, the data and the run")
    parser.add_argument("--run-dir", type=Path, help="default: runs/demo-<n>, n counts up")
    arguments, flags = parser.parse_known_args()
    console = Console(highlight=False, soft_wrap=True)
    # transformers draws a bar for every file it reads or writes.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    console.print(f"[bold]1. A weak model[/] (seed {arguments.seed})")
    assets = prepare(arguments.seed)
    console.print(f"   {assets.model}: right {assets.accuracy:.0%} of the time, after a short supervised warm start\n")

    console.print("[bold]2. The run[/]")
    run_dir = arguments.run_dir or numbered(ROOT / "runs", "demo")
    code = launch(assets, run_dir, flags)
    if code != 0:
        return code
    console.print("\n[bold]3. The reward[/], mean of ten batches")
    show_curve(console, rewards(run_dir))
    console.print("\n[bold]4. Words it has never seen[/], answered greedily by the start and by the export")
    show_answers(console, assets, run_dir)
    console.print(f"\nEverything is in {run_dir}; the model is {run_dir / 'export'}")
    return 0


def launch(assets: Assets, run_dir: Path, flags: list[str]) -> int:
    """Runs the pipeline; its exit code."""
    command = [sys.executable, ROOT / "bin" / "relax-launch", TOPOLOGY, "--run-dir", run_dir]
    command += ["--hf-checkpoint", assets.model, "--prompt-data", assets.train, "--seed", str(assets.seed), *flags]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def rewards(run_dir: Path) -> list[float]:
    """The mean reward of every batch."""
    return [row["rollout/raw_reward"] for row in read_rows(run_dir / "metrics.jsonl")]


def show_curve(console: Console, values: list[float]) -> None:
    for start in range(0, len(values), 10):
        part = values[start : start + 10]
        mean = sum(part) / len(part)
        bar = "█" * round(mean * BARS)
        console.print(f"   {start:>4}-{start + len(part) - 1:<4} {mean:.3f} {bar}")
    first, last = values[:3], values[-10:]
    console.print(
        f"   first {len(first)}: {sum(first) / len(first):.3f}   last {len(last)}: {sum(last) / len(last):.3f}"
    )


def show_answers(console: Console, assets: Assets, run_dir: Path) -> None:
    import torch
    from evaluate import evaluate_checkpoint, read_rows
    from task import MAX_RESPONSE_TOKENS

    torch.set_num_threads(1)
    rows = read_rows(assets.held_out, HELD_OUT)
    before = evaluate_checkpoint(assets.model, rows, MAX_RESPONSE_TOKENS)
    after = evaluate_checkpoint(run_dir / "export", rows, MAX_RESPONSE_TOKENS)
    table = Table(box=None, pad_edge=False, padding=(0, 3))
    for heading in ("   prompt", "before", "after", ""):
        table.add_column(heading)
    for i in range(min(SHOWN, len(rows))):
        mark = "[green]right[/]" if after.rewards[i] == 1 else "[red]wrong[/]"
        table.add_row(f"   {after.prompts[i]}", before.responses[i], after.responses[i], mark)
    console.print(table)
    console.print(f"   right of {len(rows)}: before {before.accuracy:.1%}, after {after.accuracy:.1%}")


if __name__ == "__main__":
    sys.exit(main())
