"""Metrics on their way: every value travels with its reduction and is divided once, by the last reader.

A metric is `(reduction, value, count)` with reduction "mean" (value is a sum over count things), "sum", "max", "min"
or "last". Two of one name merge without loss, whatever the order.
"""

import math

Metric = tuple[str, float, float]


class Metrics:
    """Named metrics being collected. Merging is exact because sums and counts are kept apart."""

    def __init__(self, wire: dict[str, Metric] | None = None) -> None:
        self._of: dict[str, Metric] = dict(wire or {})

    def mean(self, name: str, total: float, count: float) -> None:
        self._merge(name, ("mean", float(total), float(count)))

    def sum(self, name: str, value: float) -> None:
        self._merge(name, ("sum", float(value), 1.0))

    def max(self, name: str, value: float) -> None:
        self._merge(name, ("max", float(value), 1.0))

    def min(self, name: str, value: float) -> None:
        self._merge(name, ("min", float(value), 1.0))

    def last(self, name: str, value: float) -> None:
        self._merge(name, ("last", float(value), 1.0))

    def update(self, wire: dict[str, Metric]) -> None:
        for name, metric in wire.items():
            self._merge(name, metric)

    def wire(self) -> dict[str, Metric]:
        return dict(self._of)

    def values(self) -> dict[str, float | None]:
        """Divided, ready for a JSON row; what is not a finite number becomes None, since JSON has no NaN."""
        return {name: _finish(metric) for name, metric in self._of.items()}

    def _merge(self, name: str, new: Metric) -> None:
        old = self._of.get(name)
        if old is None:
            self._of[name] = new
            return
        if old[0] != new[0]:
            raise ValueError(f"metric {name} is reduced as {old[0]!r} and as {new[0]!r}")
        kind, value, count = new
        if kind == "max":
            value = max(old[1], value)
        elif kind == "min":
            value = min(old[1], value)
        elif kind in ("mean", "sum"):
            value = old[1] + value
        self._of[name] = (kind, value, old[2] + count if kind == "mean" else count)


def _finish(metric: Metric) -> float | None:
    kind, value, count = metric
    if kind == "mean":
        value = value / count if count else math.nan
    return value if math.isfinite(value) else None
