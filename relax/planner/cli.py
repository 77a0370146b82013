"""relax-simulate: what a run would do at other bounds on staleness, without starting anything."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relax.config.flags import Parser
from relax.config.violation import ConfigError
from relax.planner.inputs import Inputs, read
from relax.planner.pipeline import Pipeline, UnusableError
from relax.planner.prediction import Prediction, recommend

REFUSED = 2
WIDTH = 120


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 when the run or the sweep is refused, or no setting of it would train anything."""
    try:
        given = make_parser().parse(sys.argv[1:] if argv is None else argv)
        inputs = read(given)
    except ConfigError as refused:
        return _refuse(map(str, refused.violations))
    own = given.own
    if inputs.options.overlong_prompts == "filter":
        told = "warning: which prompts --overlong-prompts filter leaves out is not known here; all are planned"
        print(told, file=sys.stderr)

    from rich.console import Console

    from relax.planner.report import Change, changes, show

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    notes = list(inputs.notes)
    predictions = []
    with Console(stderr=True).status("planning"):
        for setting in inputs.settings:
            try:
                predictions.append(Pipeline(setting, inputs.lengths).predict())
            except UnusableError as useless:
                notes.append(f"{setting} is left out: {useless}")
        if not predictions:
            return _refuse(notes)
        best = recommend(predictions, own.within)
        what_if = [Change(name, Pipeline(at, inputs.lengths).predict()) for name, at in changes(best.setting)]
    show(console, inputs, predictions, best, what_if, notes, own.within)
    if own.plot is not None:
        from relax.planner.plot import draw

        draw(own.plot, predictions, best)
        console.print(f"Plot: {own.plot}")
    if own.json is not None:
        own.json.write_text(json.dumps(_record(inputs, predictions, best), indent=1) + "\n")
    return 0


def _refuse(reasons: Iterable[str]) -> int:
    print("refused:", file=sys.stderr)
    for reason in reasons:
        print(f"  - {reason}", file=sys.stderr)
    return REFUSED


def _record(inputs: Inputs, predictions: Sequence[Prediction], best: Prediction) -> dict[str, Any]:
    def row(p: Prediction) -> dict[str, Any]:
        derived = ("groups_per_second", "tokens_per_second", "batch_seconds", "mean_staleness", "max_staleness")
        return {**asdict(p), **{name: getattr(p, name) for name in derived}, "ideal_seconds": p.ideal_seconds}

    at = best.setting
    recommended = {"max_staleness": at.max_staleness, "rollout_lead": at.lead}
    return {"seed": inputs.options.seed, "recommended": recommended, "settings": [row(p) for p in predictions]}


def make_parser() -> Parser:
    parser = Parser("relax-simulate", "Predicts what a run would do, and recommends a bound on staleness.")
    parser.add_argument("topology", type=Path, help="topology file, e.g. topologies/simulated.yaml")
    plan = parser.add_argument_group("Plan")
    numbers = _list
    plan.add_argument("--sweep-staleness", type=numbers, metavar="S,...", help="bounds to plan (default: 0,1,2,4,8)")
    plan.add_argument(
        "--sweep-lead", type=numbers, metavar="L,...", help="leads to plan with each (default: the run's)"
    )
    plan.add_argument(
        "--within", type=_number(0, 1), default=0.05, metavar="X", help="speed given up for less staleness"
    )
    plan.add_argument("--prompts", type=_count, metavar="N", help="size of the prompt data, where it is not at hand")
    plan.add_argument("--hop-seconds", type=_number(0), default=0.0, metavar="X", help="way of a message (default: 0)")
    plan.add_argument(
        "--score-seconds", type=_number(0), default=0.0, metavar="X", help="reward of a group (default: 0)"
    )
    plan.add_argument("--load-seconds", type=_number(0), default=0.0, metavar="X", help="a replica's load (default: 0)")
    plan.add_argument("--plot", type=Path, metavar="FILE", help="write the sweep as a picture: .png, .svg or .pdf")
    plan.add_argument("--json", type=Path, metavar="FILE", help="write the predictions as JSON")
    return parser


def _number(least: float, most: float = float("inf")) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not least <= value < most:
            limit = f"at least {least:g}" + ("" if most == float("inf") else f" and below {most:g}")
            raise argparse.ArgumentTypeError(f"{text!r} is out of range: give a value of {limit}")
        return value

    return parse


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _list(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers like 0,1,2,4")
    return sorted({int(part) for part in parts})


if __name__ == "__main__":
    sys.exit(main())
