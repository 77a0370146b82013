"""The controller's own share of a batch's row: speed, what was dropped, how long rollout waited."""

import time
from collections.abc import Sequence

from relax.metrics import Metric, Metrics

WAITS = ("groups", "weights")


class Pace:
    """Counts since the last row and the counters that services report with their heartbeats, as differences."""

    def __init__(self) -> None:
        self.counts = Metrics()
        self._began: float | None = None
        self._waited: dict[str, float] = dict.fromkeys(WAITS, 0.0)

    def begin(self) -> None:
        """The first group is issued: what came before is start-up and no part of any batch."""
        if self._began is None:
            self._began = time.monotonic()

    def row(self, tokens: float, rollouts: Sequence[dict[str, float]]) -> dict[str, Metric]:
        """Closes a row: `tokens` were trained in it, `rollouts` are the counters of every replica."""
        now = time.monotonic()
        began = now if self._began is None else self._began
        row, self.counts, self._began = self.counts, Metrics(), now
        row.last("perf/tokens_per_s", tokens / max(now - began, 1e-9))
        row.last("perf/batch_s", now - began)
        for name in WAITS:
            total = sum(counters.get(f"wait/{name}", 0.0) for counters in rollouts)
            row.mean(f"perf/rollout_wait_s/{name}", total - self._waited[name], len(rollouts))
            self._waited[name] = total
        return row.wire()
