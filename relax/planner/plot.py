"""The sweep as a picture: speed and idle shares against the bound on staleness; how stale the trained groups are."""

from collections.abc import Sequence
from pathlib import Path

from relax.planner.prediction import Prediction


def _lines(predictions: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    """One line where each bound has one lead, otherwise one a lead."""
    lines: dict[str, list[Prediction]] = {}
    several = len({p.setting.max_staleness for p in predictions}) < len(predictions)
    for p in predictions:
        lines.setdefault(f"L = {p.setting.lead}" if several else "planned", []).append(p)
    return lines


def draw(path: Path, predictions: Sequence[Prediction], best: Prediction) -> None:
    """Writes the picture; its kind is that of the name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, idle, age) = pyplot.subplots(1, 3, figsize=(12, 3.6))
    for label, line in _lines(predictions).items():
        bounds = [p.setting.max_staleness for p in line]
        speed.plot(bounds, [p.groups_per_second for p in line], marker="o", markersize=4, label=label)
        idle.plot(bounds, [p.trainer_idle for p in line], marker="o", markersize=4, color="C0")
        idle.plot(bounds, [p.slots_idle for p in line], marker="s", markersize=4, color="C1")
    ideal = best.setting.batch_size / best.ideal_seconds
    speed.axhline(ideal, color="grey", linestyle="--", linewidth=1, label="ideal")
    at = best.setting.max_staleness, best.groups_per_second
    speed.plot(*at, marker="o", markersize=11, fillstyle="none", color="black", linestyle="", label="recommended")
    speed.set(xlabel="max-staleness S", ylabel="groups per second", ylim=(0, None))
    speed.legend(fontsize=7)
    idle.set(xlabel="max-staleness S", ylabel="idle share", ylim=(0, 1))
    idle.legend(idle.lines[:2], ["trainer", "slots"], fontsize=7)
    age.bar(list(best.staleness), [n / best.groups for n in best.staleness.values()], color="C0")
    age.set(xlabel="staleness of a group", ylabel="share, recommended setting")
    age.xaxis.get_major_locator().set_params(integer=True)
    for panel in (speed, idle, age):
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
