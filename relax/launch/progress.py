"""Live progress of a run, read from metrics.jsonl: a table on a terminal, one line a batch in a pipe."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from relax.launch.supervisor import Child
from relax.metrics.history import History, Tail

ROWS_SHOWN = 12
# Enough batches for a rate that follows changes without jumping.
RATE_WINDOW = 20


class Progress:
    """What has been seen of a run so far, and how to say it. `total` is the number of batches, None if unknown;
    `offset` the bytes of metrics that are no news (see `relax.metrics.history.end_of_rows`)."""

    def __init__(self, metrics: Path, total: int | None, offset: int = 0) -> None:
        self.total = total
        self.rows = History(ROWS_SHOWN)
        self.done = 0
        self.began = time.monotonic()
        self._tail = Tail(metrics, offset)
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)

    def update(self) -> list[dict[str, Any]]:
        """Takes in new rows and returns them."""
        rows = self._tail.read()
        for row in rows:
            self.rows.add(row)
            if int(row["batch"]) < self.done:  # resumed: how fast it was before, and how long nobody worked, is no rate
                self._arrivals.clear()
            self.done = int(row["batch"]) + 1
        if rows:
            self._arrivals.append((time.monotonic(), self.done))
        return rows

    def left(self) -> float | None:
        """Seconds left at the recent rate; None when there is no rate or no known end."""
        if self.total is None or len(self._arrivals) < 2:
            return None
        (start, first), (end, last) = self._arrivals[0], self._arrivals[-1]
        return (self.total - last) * (end - start) / (last - first) if last > first else None

    def columns(self, row: Mapping[str, Any]) -> dict[str, str]:
        """The columns of the view for one row of metrics; `-` where a metric is missing."""
        of = f"/{self.total}" if self.total else ""
        return {
            "batch": f"{int(row['batch']) + 1}{of}",
            "reward": _number(row, "rollout/raw_reward", ".3f"),
            "length": _number(row, "rollout/response_len/mean", ".1f"),
            "loss": _number(row, "train/loss", ".4f"),
            "staleness": _number(row, "train/staleness/max", ".0f"),
            "tokens/s": _number(row, "perf/tokens_per_s", ",.0f"),
        }


def _number(row: Mapping[str, Any], key: str, form: str) -> str:
    value = row.get(key)
    return format(value, form) if isinstance(value, int | float) else "-"


def duration(seconds: float | None) -> str:
    """`2h05m`, `3m07s`, `12s`; `-` for None."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


class View(Protocol):
    """What the launcher shows while the run goes on."""

    def tick(self, children: Sequence[Child]) -> None: ...


class PlainView:
    """One line a batch, for pipes and files."""

    def __init__(self, progress: Progress, out: TextIO) -> None:
        self.progress = progress
        self.out = out

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(self, *_: object) -> None:
        self.out.flush()

    def tick(self, children: Sequence[Child]) -> None:
        rows = self.progress.update()
        for row in rows:
            facts = "  ".join(f"{name} {text}" for name, text in self.progress.columns(row).items())
            left = duration(self.progress.left()) if row is rows[-1] else "-"
            print(f"{facts}  left {left}", file=self.out, flush=True)


class TableView:
    """A table that is redrawn in place, for terminals."""

    def __init__(self, progress: Progress, title: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self.progress = progress
        self.title = title
        self._live = Live(console=Console(), refresh_per_second=4, transient=False)

    def __enter__(self) -> "TableView":
        self._live.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._live.__exit__(*args)

    def tick(self, children: Sequence[Child]) -> None:
        self.progress.update()
        self._live.update(self.render(children))

    def render(self, children: Sequence[Child]) -> Any:
        """The table as it stands (a rich renderable)."""
        from rich.table import Table

        progress = self.progress
        elapsed = duration(time.monotonic() - progress.began)
        running = sum(child.process.returncode is None for child in children)
        again = "".join(f", {child.name} for the {child.restarts + 1}. time" for child in children if child.restarts)
        services = f"{running} of {len(children)} services running{again}"
        caption = f"{services}   elapsed {elapsed}   left {duration(progress.left())}"
        table = Table(title=self.title, caption=caption, title_justify="left", caption_justify="left")
        for name in progress.columns({"batch": -1}):
            table.add_column(name, justify="right")
        for row in progress.rows:
            table.add_row(*progress.columns(row).values())
        if not len(progress.rows):
            table.add_row("starting", *["-"] * (len(table.columns) - 1))
        return table
