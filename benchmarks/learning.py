"""Every algorithm on the demo's task through the whole pipeline: mean reward at the start and after 60 batches.

    .venv/bin/python benchmarks/learning.py [--algorithms grpo rloo] [--seeds 1 2 3]

Each run is the recipe in examples/algorithms/, with the demo's weak model and words in place of the untrained one. The
curves are kept in benchmarks/learning.json, so runs can be made a few at a time; the table and docs/algorithms.png are
made from all of them. A run takes one to three minutes on two cores.
"""

import argparse
import json
import tempfile
from pathlib import Path

import demo_runs
from demo_runs import ROOT

from relax.algorithms import registry

CURVES = ROOT / "benchmarks" / "learning.json"
PLOT = ROOT / "docs" / "algorithms.png"
BATCHES = 60
FIRST, LAST = 3, 10
ALGORITHMS = registry.names()
SEEDS = (1, 2, 3)


def learn(algorithm: str, seed: int, directory: Path) -> list[float]:
    """The mean reward of each batch of one run in `directory`. Raises CalledProcessError when the run fails."""
    rows = demo_runs.run(
        ROOT / "examples" / "algorithms" / f"{algorithm}.yaml",
        seed,
        directory,
        rm_exact=True,
        num_rollout=BATCHES,
        rollout_max_prompt_len=8,
        rollout_max_response_len=7,
        rollout_max_num_seqs=256,
        micro_batch_size=64,
        lr=4e-4,
        weight_decay=0,
        # REINFORCE++ has one sample a prompt, the others groups of eight: 256 samples a batch for all.
        rollout_batch_size=256 if algorithm == "reinforce_plus_plus" else 32,
    )
    return [row["rollout/raw_reward"] for row in rows]


def gain(curve: list[float]) -> tuple[float, float]:
    """Mean reward of the first three and of the last ten batches."""
    return sum(curve[:FIRST]) / FIRST, sum(curve[-LAST:]) / LAST


def table(curves: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: for each algorithm and seed, the mean reward at the start and at the end."""
    lines = ["| algorithm | " + " | ".join(f"seed {s}" for s in SEEDS) + " |", "|---" * (len(SEEDS) + 1) + "|"]
    for algorithm in ALGORITHMS:
        cells = []
        for seed in map(str, SEEDS):
            curve = curves.get(algorithm, {}).get(seed)
            cells.append("{:.2f} to {:.2f}".format(*gain(curve)) if curve else "-")
        lines.append(f"| {algorithm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(curves: dict[str, dict[str, list[float]]]) -> None:
    """One panel an algorithm, one line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(3, 3, figsize=(9, 7), sharex=True, sharey=True)
    for panel, algorithm in zip(panels.flat, ALGORITHMS, strict=True):
        for seed, curve in sorted(curves.get(algorithm, {}).items()):
            panel.plot(curve, linewidth=1, label=f"seed {seed}")
        panel.set_title(algorithm, fontsize=9)
        panel.grid(alpha=0.3)
    if panels[0, 0].lines:
        panels[0, 0].legend(fontsize=7)
    figure.supxlabel("batch")
    figure.supylabel("mean reward")
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Every algorithm on the demo's task.")
    parser.add_argument("--algorithms", nargs="*", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    arguments = parser.parse_args()
    curves = json.loads(CURVES.read_text()) if CURVES.is_file() else {}
    for seed in arguments.seeds:
        for algorithm in arguments.algorithms:
            with tempfile.TemporaryDirectory() as folder:
                curve = learn(algorithm, seed, Path(folder) / "run")
            print("{} seed {}: {:.3f} to {:.3f}".format(algorithm, seed, *gain(curve)), flush=True)
            curves.setdefault(algorithm, {})[str(seed)] = [round(value, 4) for value in curve]
            CURVES.write_text(json.dumps(curves) + "\n")
    plot(curves)
    print(table(curves))


if __name__ == "__main__":
    main()
