"""metrics.jsonl: one JSON object a batch, written once all contributors have reported or their time is up."""

import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from relax.metrics import Metric, Metrics

# Whose report says that the batch is trained.
PACEMAKER = "controller"


@dataclass(slots=True)
class _Open:
    metrics: Metrics = field(default_factory=Metrics)
    reported: set[str] = field(default_factory=set)
    deadline: float = float("inf")


class BatchRows:
    """Collects what the contributors say of each batch and appends its row, in batch order.

    A row is closed when every contributor has reported, or `patience` seconds after the controller has, which it does
    when the batch is trained: then it carries `incomplete: true`. The axes are explicit: `batch` b, `version` b + 1,
    `step` optimizer steps so far, those that only a critic took included.

    A lineage that begins at `first_batch` appends to the rows of the one before. Batches that it trains once more have
    two rows then, of which the later one counts.
    """

    def __init__(
        self,
        path: Path,
        contributors: frozenset[str],
        lineage: int,
        steps_per_batch: int,
        patience: float,
        first_batch: int = 0,
    ) -> None:
        self._path, self._contributors, self._lineage = path, contributors, lineage
        self._steps, self._patience = steps_per_batch, patience
        self._open: dict[int, _Open] = {}
        self._closed = first_batch - 1
        _mend(path)

    def report(self, batch: int, contributor: str, metrics: dict[str, Metric]) -> None:
        """Take one contributor's share of a batch's row. A second report of the same contributor is a duplicate."""
        if batch <= self._closed:
            return
        row = self._open.setdefault(batch, _Open())
        if contributor in row.reported:
            return
        row.reported.add(contributor)
        row.metrics.update(metrics)
        if contributor == PACEMAKER:
            row.deadline = time.monotonic() + self._patience

    @property
    def open(self) -> bool:
        """Whether a row waits for a contributor."""
        return bool(self._open)

    def close_due(self, everything: bool = False) -> None:
        """Append every row that is complete or out of time; `everything` closes every row of a trained batch."""
        while (row := self._open.get(self._closed + 1)) is not None:
            complete = row.reported >= self._contributors
            if not complete and not (everything and PACEMAKER in row.reported) and time.monotonic() < row.deadline:
                return
            self._closed += 1
            del self._open[self._closed]
            self._append(self._closed, row, complete)

    def _append(self, batch: int, row: _Open, complete: bool) -> None:
        axes = {
            "step": (batch + 1) * self._steps,
            "version": batch + 1,
            "batch": batch,
            "lineage": self._lineage,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        line = axes | dict(sorted(row.metrics.values().items())) | ({} if complete else {"incomplete": True})
        with self._path.open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def _mend(path: Path) -> None:
    """Cuts off the row that a killed process was writing, which the next one would be appended to."""
    if path.is_file():
        with path.open("rb+") as file:
            whole, newline, _ = file.read().rpartition(b"\n")
            file.truncate(len(whole) + len(newline))
