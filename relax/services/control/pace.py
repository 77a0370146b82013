"""The controller's own share of a batch's row: speed, lengths, what was dropped, how long rollout waited."""

import time
from collections.abc import Callable, Mapping

from relax.metrics import Metric, Metrics

WAITS = ("groups", "weights")


class Pace:
    """Counts since the last row and the counters that services report with their heartbeats, as differences.

    `clock` is in seconds and only rises. Lengths are response tokens of all samples of a group: of those that were
    generated, trained and dropped since the last row. Of a dropped one they are known when it had been sampled.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts = Metrics()
        self._clock = clock
        self._began: float | None = None
        self._trained = 0  # tokens since the last row
        self._waited: dict[str, dict[str, float]] = {}  # replica -> its counters in the last row

    def begin(self) -> None:
        """The first group is issued: what came before is start-up and no part of any batch."""
        if self._began is None:
            self._began = self._clock()

    def generated(self, tokens: int) -> None:
        self.counts.mean("rollout/group_tokens/generated", tokens, 1)

    def trained(self, tokens: int) -> None:
        self._trained += tokens
        self.counts.mean("rollout/group_tokens/trained", tokens, 1)

    def dropped(self, reason: str, tokens: int | None) -> None:
        self.counts.sum(f"rollout/dropped/{reason}", 1)
        if tokens is not None:
            self.counts.mean("rollout/group_tokens/dropped", tokens, 1)

    def set_aside(self) -> None:
        self.counts.sum("rollout/set_aside", 1)

    def row(self, rollouts: Mapping[str, Mapping[str, float]]) -> dict[str, Metric]:
        """Closes a row; `rollouts` are the counters of every replica by its incarnation."""
        now = self._clock()
        began = now if self._began is None else self._began
        row, self.counts, self._began = self.counts, Metrics(), now
        tokens, self._trained = self._trained, 0
        row.sum("perf/response_tokens", tokens)
        row.last("perf/tokens_per_s", tokens / max(now - began, 1e-9))
        row.last("perf/batch_s", now - began)
        for name in WAITS:
            key = f"wait/{name}"
            before = {replica: self._waited.get(replica, {}).get(key, 0.0) for replica in rollouts}
            waited = sum(counters.get(key, 0.0) - before[replica] for replica, counters in rollouts.items())
            row.mean(f"perf/rollout_wait_s/{name}", waited, len(rollouts))
        self._waited = {replica: dict(counters) for replica, counters in rollouts.items()}
        return row.wire()
