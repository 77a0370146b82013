"""What a plan says, as a table and a recommendation with its reason."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from relax.planner.inputs import Inputs
from relax.planner.prediction import Prediction
from relax.planner.setting import Setting

# An idle share below this is no reserve that a user could win.
BUSY = 0.1
# A what-if that gains less is not worth a line.
WORTHWHILE = 0.02
# Rows stay rows, whatever the width of the terminal.
TABLE_WIDTH = 200


@dataclass(frozen=True, slots=True)
class Change:
    """One option changed in the recommended setting, and what comes of it."""

    flag: str
    prediction: Prediction


def changes(setting: Setting) -> Iterator[tuple[str, Setting]]:
    """Options whose effect on the recommended setting is worth knowing, one changed at a time."""
    if setting.max_staleness > 0 and not setting.partial_rollout:
        yield "--partial-rollout", replace(setting, partial_rollout=True)
    credit = 2 * setting.credit
    if setting.max_staleness > 0:  # lockstep gives a batch out whole, whatever was asked for
        yield f"--rollout-credit {credit}", replace(setting, credit=credit)


def show(
    console: Console,
    inputs: Inputs,
    predictions: Sequence[Prediction],
    best: Prediction,
    what_if: Sequence[Change],
    notes: Sequence[str],
    within: float,
) -> None:
    _head(console, inputs, best)
    console.print(_table(inputs, predictions, best), width=TABLE_WIDTH, crop=False)
    for p in predictions:
        if p.dropped:
            console.print(_drops(p))
    for note in notes:
        console.print(f"{note}.")
    _recommend(console, predictions, best, within)
    for change in what_if:
        gain = change.prediction.groups_per_second / best.groups_per_second - 1
        if gain >= WORTHWHILE:
            console.print(f"With {change.flag} as well: {gain:.0%} faster.")
    planned = [*predictions, *(change.prediction for change in what_if)]
    groups, wall = sum(p.issued for p in planned), sum(p.wall_seconds for p in planned)
    console.print(
        f"{len(planned)} runs with {groups:,} groups planned in {wall:.1f} s, "
        f"{groups / max(wall, 1e-9):,.0f} groups a second."
    )


def _head(console: Console, inputs: Inputs, best: Prediction) -> None:
    o, s = inputs.options, inputs.own
    end = " or ".join(
        text
        for text in (
            f"{o.num_rollout} batches" if o.num_rollout else "",
            f"{o.num_epoch} epochs of {inputs.prompts:,} prompts" if o.num_epoch else "",
        )
        if text
    )
    update = "partial rollouts" if s.partial_rollout else "draining replicas"
    console.print(
        f"Plan of {inputs.path}: {len(s.replicas):,} replicas x {s.slots} slots at {o.sim_tokens_per_second} tokens/s, "
        f"batches of {s.batch_size:,} groups x {s.samples} samples of {o.sim_length} tokens, {end}, {update}, "
        f"seed {o.seed}."
    )
    slower = "training" if best.setting.train_seconds >= best.generation_seconds else "generation"
    console.print(
        f"A batch takes {best.generation_seconds:.3g} s to generate if no slot is ever idle and "
        f"{s.train_seconds:.3g} s to train: no setting is faster than {slower}, {best.ideal_seconds:.3g} s a batch."
    )


def _table(inputs: Inputs, predictions: Sequence[Prediction], best: Prediction) -> Table:
    lockstep = next((p for p in predictions if p.setting.max_staleness == 0), None)
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = ["S", "L", "batch s", "groups/s", "tokens/s", "of ideal"]
    names += ["x lockstep"] if lockstep else []
    names += ["trainer idle", "slots idle", "staleness", "max"]
    for name in [*names, ""]:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for p in predictions:
        cells = [
            str(p.setting.max_staleness),
            str(p.setting.lead),
            f"{p.batch_seconds:.3g}",
            f"{p.groups_per_second:,.4g}",
            f"{p.tokens_per_second:,.0f}",
            f"{p.ideal_seconds / p.batch_seconds:.0%}",
        ]
        cells += [f"{lockstep.batch_seconds / p.batch_seconds:.2f}"] if lockstep else []
        cells += [f"{p.trainer_idle:.0%}", f"{p.slots_idle:.0%}", f"{p.mean_staleness:.2f}", str(p.max_staleness)]
        marks = ["recommended"] if p is best and len(predictions) > 1 else []
        marks += ["this run"] if p.setting == inputs.own else []
        table.add_row(*cells, ", ".join(marks), style="bold" if p is best else None)
    return table


def _drops(p: Prediction) -> str:
    """What was dropped, and the mean lengths of trained and dropped samples: what dropping favours."""
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in sorted(p.dropped.items()))
    trained = p.tokens / (p.groups * p.setting.samples)
    dropped = p.dropped_tokens / p.dropped_samples
    return (
        f"{p.setting}: dropped of {p.issued:,} draws: {reasons}; a trained sample has {trained:.0f} tokens, a dropped "
        f"one would have had {dropped:.0f}."
    )


def _recommend(console: Console, predictions: Sequence[Prediction], best: Prediction, within: float) -> None:
    if len(predictions) > 1:
        fastest = max(predictions, key=lambda p: p.groups_per_second)
        share = best.groups_per_second / fastest.groups_per_second
        s = best.setting
        console.print(f"Recommended: --max-staleness {s.max_staleness} --rollout-lead {s.lead}", style="bold")
        console.print(
            f"It is the least staleness, then the least lead, within {within:.0%} of the fastest setting (this one has "
            f"{share:.1%} of it): stale samples teach less, so age is taken only where it buys speed."
        )
    ages = ", ".join(f"{age}: {n / best.groups:.1%}" for age, n in best.staleness.items())
    console.print(f"Groups by staleness: {ages}.")
    console.print(limit(best))


def limit(p: Prediction) -> str:
    """What holds a setting back, in a sentence."""
    if p.trainer_idle < BUSY:
        return f"The trainer is busy {1 - p.trainer_idle:.0%} of the time: more replicas would not make it faster."
    if p.slots_idle < BUSY:
        return f"The slots are busy {1 - p.slots_idle:.0%} of the time: more replicas or slots would make it faster."
    waits = (
        "of a batch"
        if p.setting.partial_rollout or p.setting.max_staleness == 0
        else "of a batch or a draining replica"
    )
    return (
        f"Neither is busy all the time (trainer {1 - p.trainer_idle:.0%}, slots {1 - p.slots_idle:.0%}): they wait for "
        f"each other, and for the longest samples {waits}."
    )
