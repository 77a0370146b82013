"""Real processes against the planner, on the same draws: how much of a plan a run reaches, and what staleness buys.

    .venv/bin/python benchmarks/simulation.py [--batches 300] [--seeds 1 2 3 4 5] [--mean-seconds 0.2] [--jobs 1]

topologies/simulated.yaml with 64 generation slots over 4 replicas, batches of 128 groups of one sample, log-normal
lengths with sigma 1, and a trainer that takes as long as the slots need when none is idle. For each bound on staleness
and each seed the whole pipeline runs (controller, protocol, gate, ledger, weights; only the model is missing) and
`relax-simulate` plans the same run; both count from the first issue to the end of the last batch. Above lockstep the
runs have --partial-rollout: with lengths like these a replica that drains waits for its longest sample.

Results are kept in benchmarks/simulation.json after every run; what is there already is not run again, so an
interrupted measurement goes on where it was. `--plan` shows what the planner alone says.
"""

import argparse
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from relax.metrics.history import read_rows
from relax.planner.cli import make_parser
from relax.planner.inputs import read
from relax.planner.pipeline import Pipeline

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "simulation.json"
TOPOLOGY = ROOT / "topologies" / "simulated.yaml"
REPLICAS, SLOTS, GROUPS, MEAN_TOKENS = 4, 16, 128, 50
# (S, L): the least speed-up over lockstep that is asked for.
SETTINGS: dict[tuple[int, int], float | None] = {(0, 0): None, (1, 1): 1.6, (4, 2): 3.0, (8, 2): 4.0}
LEAST_RATIO = 0.95
# A run that takes so many times its plan hangs.
PATIENCE = 4.0


@dataclass(frozen=True)
class Case:
    bound: int
    lead: int
    seed: int
    batches: int
    mean_seconds: float

    @property
    def key(self) -> str:
        return f"S={self.bound} L={self.lead} seed={self.seed} batches={self.batches} mean={self.mean_seconds:g}"

    @property
    def flags(self) -> list[str]:
        flags: dict[str, Any] = {
            "seed": self.seed,
            "num-rollout": self.batches,
            "rollout-batch-size": GROUPS,
            "n-samples-per-prompt": 1,
            "max-staleness": self.bound,
            "rollout-lead": self.lead,
            "sim-slots": SLOTS,
            "sim-length": f"lognormal:{MEAN_TOKENS},1",
            "sim-tokens-per-second": MEAN_TOKENS / self.mean_seconds,
            "sim-train-seconds": GROUPS * self.mean_seconds / (REPLICAS * SLOTS),
            "sim-publish-seconds": 0,
        }
        words = [f"--{name}={value}" for name, value in flags.items()]
        return [*words, "--partial-rollout"] if self.bound else words


def plan(case: Case) -> dict[str, Any]:
    """What relax-simulate says of exactly this run."""
    inputs = read(make_parser().parse([str(TOPOLOGY), *case.flags]))
    predicted = Pipeline(inputs.own, inputs.lengths).predict()
    return {"seconds": predicted.seconds, "tokens": predicted.tokens, "staleness": predicted.max_staleness}


def run(case: Case, planned: dict[str, Any]) -> dict[str, Any]:
    """The same run by real processes. Raises RuntimeError when it fails or breaks its bound; its directory stays."""
    folder = Path(tempfile.mkdtemp(prefix="relax-simulation-"))
    directory = folder / "run"
    command = [sys.executable, ROOT / "bin" / "relax-launch", TOPOLOGY, *case.flags, f"--run-dir={directory}"]
    patience = 120 + PATIENCE * planned["seconds"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience, check=False)
    if done.returncode:
        raise RuntimeError(f"{case.key} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    with sqlite3.connect(f"file:{directory}/ledger.sqlite?mode=ro", uri=True) as ledger:
        (first,) = ledger.execute("SELECT min(first_issued_at) FROM groups").fetchone()
        (last,) = ledger.execute("SELECT max(trained_at) FROM batches").fetchone()
        trained, tokens = ledger.execute("SELECT count(*), sum(tokens) FROM groups WHERE state = 'trained'").fetchone()
    stalest = max(row["train/staleness/max"] for row in read_rows(directory / "metrics.jsonl"))
    if trained != case.batches * GROUPS or stalest > case.bound:
        raise RuntimeError(
            f"{case.key}: {trained} groups were trained, the stalest of staleness {stalest}: {directory}"
        )
    if case.bound == 0 and tokens != planned["tokens"]:
        raise RuntimeError(f"{case.key}: {tokens} tokens were drawn, the plan has {planned['tokens']}: {directory}")
    shutil.rmtree(folder)
    return {"seconds": last - first, "tokens": tokens, "staleness": stalest}


def measure(cases: list[Case], jobs: int, results: dict[str, Any], kept_at: Path) -> None:
    """Runs what is not in `results` yet, the settings of one seed next to each other."""

    writing = threading.Lock()

    def one(case: Case) -> None:
        planned = plan(case)
        real = run(case, planned)
        with writing:
            results[case.key] = {"planned": planned, "real": real}
            kept_at.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{case.key}: {real['seconds']:.1f} s, planned {planned['seconds']:.1f} s", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        for outcome in [pool.submit(one, case) for case in cases if case.key not in results]:
            outcome.result()


def table(cases: list[Case], results: dict[str, Any]) -> str:
    """Markdown: for each setting, means over the seeds that have both the setting and lockstep."""
    lines = [
        "| S | L | runs | s a batch | planned | run / plan: mean, least | times lockstep | planned | goal |",
        "|---" * 9 + "|",
    ]
    for (bound, lead), goal in SETTINGS.items():
        pairs = []
        for case in cases:
            lockstep = Case(0, 0, case.seed, case.batches, case.mean_seconds)
            if (case.bound, case.lead) == (bound, lead) and case.key in results and lockstep.key in results:
                pairs.append((results[case.key], results[lockstep.key], case.batches))
        if not pairs:
            lines.append(f"| {bound} | {lead} | 0 |" + " |" * 6)
            continue

        def mean(kind: str, pairs: list[Any] = pairs) -> float:
            return fmean(own[kind]["seconds"] / batches for own, _, batches in pairs)

        def gain(kind: str, pairs: list[Any] = pairs) -> float:
            return fmean(base[kind]["seconds"] / own[kind]["seconds"] for own, base, _ in pairs)

        ratios = [own["planned"]["seconds"] / own["real"]["seconds"] for own, _, _ in pairs]
        lines.append(
            f"| {bound} | {lead} | {len(pairs)} | {mean('real'):.3f} | {mean('planned'):.3f} | {fmean(ratios):.3f}, "
            f"{min(ratios):.3f} | {gain('real'):.2f} | {gain('planned'):.2f} | {LEAST_RATIO}"
            + (f", {goal} times |" if goal else " |")
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Real processes against the planner, on the same draws.")
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--mean-seconds", type=float, default=0.2, help="mean time of a group in its slot")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; more than the cores carry slow each other")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are kept")
    parser.add_argument("--plan", action="store_true", help="plan only, run nothing, keep nothing")
    arguments = parser.parse_args()
    kept_at = arguments.results.absolute()
    os.chdir(ROOT)  # the topology's paths start there
    cases = [
        Case(*setting, seed, arguments.batches, arguments.mean_seconds)
        for seed, setting in product(arguments.seeds, SETTINGS)
    ]
    if arguments.plan:
        plans = {case.key: plan(case) for case in cases}
        print(table(cases, {key: {"planned": planned, "real": planned} for key, planned in plans.items()}))
        return
    results = json.loads(kept_at.read_text()) if kept_at.is_file() else {}
    measure(cases, arguments.jobs, results, kept_at)
    print(table(cases, results))


if __name__ == "__main__":
    main()
