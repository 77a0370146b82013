"""Samples sixteen versions old, on the demo's task: GRPO as it is, GRPO with TIS, and M2PO.

    .venv/bin/python benchmarks/corrections.py [--arms grpo m2po] [--seeds 1 2 3] [--batches 80]

Every run is the whole pipeline with --max-staleness 16 and --rollout-lead 16. A batch is cut into eight optimizer
steps, which makes the trainer the slower side, so that rollout runs ahead as far as it may. Curves are kept in
benchmarks/corrections.json after each run: an interrupted measurement goes on where it stopped. The table and
docs/corrections.png are made from all of them. A run takes one to three minutes on two cores. Load on the machine
changes which versions sampled a batch, and so the curves a little; the staleness is among them.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import demo_runs
import numpy as np
from demo_runs import ROOT

RESULTS = ROOT / "benchmarks" / "corrections.json"
PLOT = ROOT / "docs" / "corrections.png"
SEEDS = (1, 2, 3)
BATCHES = 80
FIRST, LAST = 3, 10
# Rollout is as far ahead as it gets.
SETTLED = 20

COMMON: dict[str, Any] = {
    "max_staleness": 16,
    "rollout_lead": 16,
    "rollout_batch_size": 16,
    "n_samples_per_prompt": 8,
    "rollout_max_num_seqs": 512,
    "num_steps_per_rollout": 8,
    # One micro-batch a step, so that M2PO solves its band over the whole step.
    "micro_batch_size": 16,
    # M2PO logs means over tokens then, which is what its budget bounds.
    "calculate_per_token_loss": True,
    "lr": 2e-4,
}
GRPO = {"advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.28, "use_rollout_logprobs": False}
M2PO = {"m2po_kl2_budget": 0.04, "m2po_miniclip_low": 0.2, "m2po_miniclip_high": 0.28}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("GRPO, no correction", GRPO | {"no_off_policy_correction": True}),
    "grpo_tis": ("GRPO + TIS", GRPO | {"use_tis": True}),
    "m2po": ("M2PO", M2PO | {"advantage_estimator": "m2po", "use_rollout_logprobs": True}),
}
COLUMNS = {
    "reward": "rollout/raw_reward",
    "clip_fraction": "train/pg_clipfrac",
    "entropy": "train/entropy",
    "kl": "train/mismatch_k3_kl",
    "grad_norm": "train/grad_norm",
    "m2_before": "train/ppo_kl_m2_before",
    "m2_after": "train/ppo_kl_m2_after",
    "weight_before": "train/tis",
    "weight_after": "train/tis_weight",
    "weights_clipped": "train/tis_clipfrac",
    "largest_weight": "train/tis_max",
    "staleness": "train/staleness/mean",
    "largest_staleness": "train/staleness/max",
}
# (title, [(column, line style)], logarithmic)
PANELS = (
    ("mean reward", [("reward", "-")], False),
    ("entropy", [("entropy", "-")], False),
    ("clip fraction of the policy loss", [("clip_fraction", "-")], False),
    ("KL of the engine's policy to the trainer's (k3)", [("kl", "-")], True),
    ("M2PO: second moment before and after (dashed)", [("m2_before", "-"), ("m2_after", "--")], True),
    ("mean staleness", [("staleness", "-")], False),
)

Curves = dict[str, list[float]]
Results = dict[str, dict[str, Curves]]  # arm -> seed -> column -> one value a batch


def measure(arm: str, seed: int, batches: int, directory: Path) -> Curves:
    """The curves of one run, those of COLUMNS that the arm has."""
    options = COMMON | ARMS[arm][1] | {"num_rollout": batches}
    rows = demo_runs.run(demo_runs.DEMO / "demo.yaml", seed, directory, **options)
    held = {column: name for column, name in COLUMNS.items() if name in rows[-1]}
    return {column: [float(f"{row[name]:.4g}") for row in rows] for column, name in held.items()}


def load(batches: int) -> Results:
    """What was measured before under the same options. SystemExit when it was under others."""
    if not RESULTS.is_file():
        return {}
    kept = json.loads(RESULTS.read_text())
    if kept["options"] != _options(batches):
        raise SystemExit(f"{RESULTS} was measured with other options; remove it to measure anew")
    results: Results = kept["runs"]
    return results


def save(batches: int, results: Results) -> None:
    RESULTS.write_text(json.dumps({"options": _options(batches), "runs": results}) + "\n")


def _options(batches: int) -> dict[str, Any]:
    return {"num_rollout": batches} | COMMON | {arm: options for arm, (_, options) in ARMS.items()}


def table(results: Results) -> str:
    """Markdown: what each run learned, and how far from on-policy it was."""
    heads = ("", "seed", "reward, first 3", "mean", "last 10", "entropy, last 10", "clip fraction", "staleness", "KL")
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for arm, (title, _) in ARMS.items():
        for seed, curves in sorted(results.get(arm, {}).items()):
            reward = curves["reward"]
            settled = {name: float(np.mean(curves[name][SETTLED:])) for name in ("clip_fraction", "staleness", "kl")}
            cells = [title, seed, f"{np.mean(reward[:FIRST]):.2f}", f"{np.mean(reward):.2f}"]
            cells += [f"{np.mean(reward[-LAST:]):.2f}", f"{np.mean(curves['entropy'][-LAST:]):.3f}"]
            cells += [f"{settled['clip_fraction']:.3f}", f"{settled['staleness']:.1f}", f"{settled['kl']:.3f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def moments(results: Results) -> str:
    """What bounds did, over the settled part of all seeds: M2PO's second moment, the importance weights."""
    lines = []
    for arm, before, after in (("m2po", "m2_before", "m2_after"), ("grpo_tis", "weight_before", "weight_after")):
        runs = results.get(arm, {}).values()
        if runs:
            means = (_settled_mean(runs, before), _settled_mean(runs, after))
            lines.append(f"{ARMS[arm][0]}: {before} {means[0]:.3g}, {after} {means[1]:.3g}")
    if runs := results.get("grpo_tis", {}).values():
        largest = max(max(curves["largest_weight"]) for curves in runs)
        lines.append(f"weights clipped {_settled_mean(runs, 'weights_clipped'):.3f}, the largest {largest:.3g}")
    return "\n".join(lines)


def _settled_mean(runs: Iterable[Curves], column: str) -> float:
    return float(np.mean([np.mean(curves[column][SETTLED:]) for curves in runs]))


def plot(results: Results) -> None:
    """A panel a quantity, a colour an arm: each seed thin, their mean thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 3, figsize=(12, 6.5), sharex=True)
    for panel, (title, columns, logarithmic) in zip(panels.flat, PANELS, strict=True):
        for colour, (arm, (name, _)) in zip(("C3", "C0", "C2"), ARMS.items(), strict=True):
            for column, style in columns:
                curves = [run[column] for _, run in sorted(results.get(arm, {}).items()) if column in run]
                for curve in curves:
                    panel.plot(curve, style, color=colour, linewidth=0.6, alpha=0.35)
                if curves:
                    panel.plot(np.mean(curves, 0), style, color=colour, linewidth=1.6, label=name)
        panel.set_title(title, fontsize=9)
        if logarithmic:
            panel.set_yscale("log")
            panel.set_ylim(bottom=1e-5)
        panel.grid(alpha=0.3)
    panels[0, 0].legend(fontsize=8)
    figure.supxlabel("batch")
    figure.tight_layout()
    figure.savefig(PLOT, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO, GRPO with TIS and M2PO on samples sixteen versions old.")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--batches", type=int, default=BATCHES)
    arguments = parser.parse_args()
    results = load(arguments.batches)
    for seed in arguments.seeds:
        for arm in arguments.arms:
            if str(seed) in results.get(arm, {}):
                continue
            with tempfile.TemporaryDirectory() as folder:
                curves = measure(arm, seed, arguments.batches, Path(folder) / "run")
            reward = curves["reward"]
            print(f"{arm} seed {seed}: {np.mean(reward[:FIRST]):.3f} to {np.mean(reward[-LAST:]):.3f}", flush=True)
            results.setdefault(arm, {})[str(seed)] = curves
            save(arguments.batches, results)
    plot(results)
    print(table(results))
    print(moments(results))


if __name__ == "__main__":
    main()
