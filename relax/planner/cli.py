"""relax-simulate: what a run would do at other bounds on staleness, without starting anything."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relax.config.flags import Parser
from relax.config.violation import ConfigError, Violation
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
    told = list(reasons)
    print(f"refused, for {f'{len(told)} reasons' if len(told) > 1 else '1 reason'}:", file=sys.stderr)
    for reason in told:
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

    def add(name: str, parse: Parse, metavar: str, text: str, default: Any = None) -> None:
        plan.add_argument(name, type=_told_later(name, parse), metavar=metavar, default=default, help=text)

    add("--sweep-staleness", _list, "S,...", "bounds to plan (default: 0,1,2,4,8)")
    add("--sweep-lead", _list, "L,...", "leads to plan with each (default: the run's)")
    add("--within", _number(0, 1), "X", "share of the best speed given up for less staleness (default: 0.05)", 0.05)
    add("--prompts", _count, "N", "size of the prompt data, where it is not at hand")
    add("--hop-seconds", _number(0), "X", "way of a message (default: 0)", 0.0)
    add("--score-seconds", _number(0), "X", "reward of a group (default: 0)", 0.0)
    add("--load-seconds", _number(0), "X", "a replica's load of new weights (default: 0)", 0.0)
    add("--plot", Path, "FILE", "write the sweep as a picture: .png, .svg or .pdf")
    add("--json", Path, "FILE", "write the predictions as JSON")
    return parser


Parse = Callable[[str], Any]


class _BadValue(ValueError):
    def __init__(self, problem: str, fix: str) -> None:
        self.problem, self.fix = problem, fix


def _told_later(name: str, parse: Parse) -> Parse:
    """argparse ends at the first value that is none; this one takes the place of the value, to be told with all."""

    def take(text: str) -> Any:
        try:
            return parse(text)
        except _BadValue as bad:
            return Violation(name, text, bad.problem, bad.fix, "flag")

    return take


def _number(least: float, most: float = float("inf")) -> Parse:
    limit = f"at least {least:g}" + ("" if most == float("inf") else f" and below {most:g}")

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise _BadValue("is not a number", f"Give a number of {limit}.") from None
        if not least <= value < most:
            raise _BadValue("is out of range", f"Give a number of {limit}.")
        return value

    return parse


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise _BadValue("is not a whole number above 0", "Give the number of prompts.")
    return int(text)


def _list(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise _BadValue("is not a list of whole numbers", "Write one like 0,1,2,4.")
    return sorted({int(part) for part in parts})


if __name__ == "__main__":
    sys.exit(main())
