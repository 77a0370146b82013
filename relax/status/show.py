"""How a look at a run reads: lines and tables, plain for pipes and files, with rich on a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from relax.launch.progress import duration
from relax.ledger.states import State
from relax.status.look import RunState, Status

PLACES_SHOWN = 4
WAITING_FOR = {
    State.PENDING: "to be issued again",
    State.ISSUED: "sampling",
    State.SAMPLED: "scoring",
    State.SCORED: "filters, reference",
    State.READY: "commit",
    State.COMMITTED: "training",
}
ROW_KEYS = {
    "perf/tokens_per_s": "tokens/s",
    "perf/batch_s": "s a batch",
    "perf/trainer_wait_s/batch": "trainer waits for a batch",
    "perf/trainer_wait_s/publication": "for publication",
    "perf/rollout_wait_s/groups": "rollout waits for groups",
    "perf/rollout_wait_s/weights": "for weights",
}


@dataclass(frozen=True, slots=True)
class Table:
    """`left` are the columns of text; the others are numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: frozenset[int]


Block = str | Table


def blocks(status: Status) -> Iterator[Block]:
    """The answer from top to bottom."""
    yield from _run(status)
    if status.ledger is not None:
        yield _stages(status)
        yield from _oldest(status)
    yield from _rates(status)
    if status.snapshot is not None:
        yield _services(status)
    yield from _lost(status)
    yield from _errors(status)
    for problem in status.problems:
        yield f"problem: {problem}"


def _run(status: Status) -> Iterator[str]:
    snapshot, ledger = status.snapshot, status.ledger
    text = f"{status.run.path.name} ({status.run.run_id}): {status.state.value}"
    code = status.ended.code if status.ended is not None else snapshot.code if snapshot is not None else None
    if code is not None:
        text += f", exit code {code}"
    if ledger is not None:
        text += f" {'for' if status.state.goes_on else 'after'} {duration(status.now - ledger.opened_at)}"
    if status.run.lineage:
        text += f"; lineage {status.run.lineage}, resumed at batch {status.run.cut}"
    yield text
    if status.ended is not None and status.ended.code:
        yield f"launcher: {status.ended.text}"
        if status.ended.first_error:
            yield status.ended.first_error
    if status.state is RunState.SILENT and snapshot is not None:
        quiet = duration(status.now - snapshot.time)
        yield f"its controller on {snapshot.host} has not written status.json for {quiet}"
    if status.state is RunState.CRASHED and snapshot is not None:
        yield f"its controller (pid {snapshot.controller.pid}) is dead, and nothing says why; see the end of its output"
    if status.state is RunState.OVER:
        yield "no process of this host takes part in it, and no status.json says how it ended"
    if ledger is not None:
        total = snapshot.batches if snapshot is not None else None
        of = f" of {total}" if total is not None else ""
        text = f"batches: {ledger.trained}{of} trained, {ledger.committed} committed"
        if snapshot is not None:
            text += f"; published version {'none' if snapshot.published is None else snapshot.published}"
        if status.state.goes_on and total is not None and ledger.batch_seconds:
            text += f"; left {duration((total - ledger.trained) * ledger.batch_seconds)}"
        yield text
    if (made := status.checkpoint) is not None:
        age = duration(max(0.0, status.now - datetime.fromisoformat(made.created_at).timestamp()))
        of = f" in lineage {made.lineage}" if status.run.lineage else ""
        yield f"checkpoint: {made.batch}, written {age} ago{of}, {_text(made.size / 1e6)} MB"
    elif ledger is not None:
        yield "checkpoint: none"
    if snapshot is not None and status.state.goes_on:
        yield f"next: {snapshot.waits}; last progress {_age(status.now - snapshot.moved)} ago"
        if snapshot.missing:
            yield f"not joined yet: {', '.join(snapshot.missing)}"


def _stages(status: Status) -> Table:
    assert status.ledger is not None
    rows = []
    for stage in status.ledger.stages:
        places = [f"{name or 'nobody'} {n}" for name, n in list(stage.where.items())[:PLACES_SHOWN]]
        if len(stage.where) > PLACES_SHOWN:
            places.append(f"and {len(stage.where) - PLACES_SHOWN} more")
        age = "-" if stage.since is None else _age(status.now - stage.since)
        rows.append((stage.state.word, WAITING_FOR[stage.state], str(stage.groups), age, ", ".join(places)))
    return Table(("state", "waits for", "groups", "longest", "where"), tuple(rows), frozenset({0, 1, 4}))


def _oldest(status: Status) -> Iterator[str]:
    assert status.ledger is not None
    snapshot = status.snapshot
    if snapshot is not None:
        yield f"slots: {snapshot.slots - snapshot.free_slots} of {snapshot.slots} taken, {snapshot.ready} groups ready"
    for group in status.ledger.oldest[:1]:
        where = group.location if group.state != State.ISSUED.word else group.holder
        version = "" if group.oldest is None else f", oldest token of version {group.oldest}"
        drawn, entered = _age(status.now - group.drawn_at), _age(status.now - group.entered_at)
        who = f"group {group.group} (attempt {group.attempt}), drawn {drawn} ago"
        place = f"{group.state} for {entered} at {where or 'nobody'} (replica {group.holder or 'none'})"
        yield f"oldest open: {who}, {place}{version}"


def _rates(status: Status) -> Iterator[str]:
    ledger, rows = status.ledger, status.rows
    if ledger is not None:
        sampled = f"{ledger.sampled_groups_per_s:,.1f} groups/s, {ledger.sampled_tokens_per_s:,.0f} tokens/s"
        text = f"sampled in the last minute: {sampled}"
        if ledger.trained_groups_per_s is not None:
            text += (
                f"; trained: {ledger.trained_groups_per_s:,.1f} groups/s, {ledger.trained_tokens_per_s:,.0f} tokens/s"
            )
        yield text
    if rows:
        mean, worst = _mean(rows, "train/staleness/mean"), _numbers(rows, "train/staleness/max")
        ever = "-" if ledger is None or ledger.staleness is None else str(ledger.staleness)
        largest = f"{max(worst):.0f}" if worst else "-"
        yield f"staleness, last {len(rows)} batches: mean {_text(mean)}, largest {largest}; largest ever {ever}"
        parts = [f"{label} {_text(_mean(rows, key))}" for key, label in ROW_KEYS.items() if _numbers(rows, key)]
        yield f"a batch, mean of {len(rows)}: {', '.join(parts)}"


def _services(status: Status) -> Table:
    assert status.snapshot is not None
    rows = []
    for seen in status.snapshot.services:
        alive = status.alive.get(seen.name)
        life = "left" if seen.gone else {True: "yes", False: "no", None: "?"}[alive]
        holds = "-" if seen.sampling is None else f"{seen.sampling}+{seen.keeps}"
        rows.append(
            (
                seen.name,
                seen.node or "-",
                str(seen.pid),
                life,
                seen.incarnation,
                str(seen.lives - 1),
                _age(status.now - seen.heard),
                "-" if seen.rss_bytes is None else f"{seen.rss_bytes / 1e6:,.0f}",
                "-" if seen.version is None else str(seen.version),
                holds,
                seen.activity,
            )
        )
    head = ("service", "node", "pid", "alive", "life", "restarts", "heard", "MB", "version", "holds", "activity")
    return Table(head, tuple(rows), frozenset({0, 1, 3, 4, 10}))


def _lost(status: Status) -> Iterator[str]:
    ledger = status.ledger
    if ledger is None:
        return
    balance = ledger.conservation
    of = f" of lineage {ledger.lineage}" if ledger.lineage else ""
    yield f"groups{of}: {balance}"
    if not balance.holds:
        yield "problem: groups are missing from the ledger's own account"
    if status.set_aside:
        yield f"prompts set aside: {status.set_aside}"
    for title, counts in (("events", ledger.events), ("stale reports", ledger.stale_reports)):
        if counts:
            told = ", ".join(f"{name.removeprefix('stale/')} {n}" for name, n in sorted(counts.items()))
            yield f"{title}: {told}"


def _errors(status: Status) -> Iterator[str]:
    if not status.errors:
        yield "errors: none in the logs"
    for error in status.errors:
        mark = "first error" if error.first else "last error"
        count = f" ({error.count} in all)" if error.count > 1 else ""
        yield f"{mark}: {error.time[11:19]} {error.service}{count}: {error.text}"


def _numbers(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if isinstance(row.get(key), int | float)]


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    numbers = _numbers(rows, key)
    return sum(numbers) / len(numbers) if numbers else None


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _age(seconds: float) -> str:
    return f"{max(seconds, 0.0):.1f}s" if seconds < 60 else duration(seconds)


def plain(parts: Sequence[Block]) -> str:
    """Lines and padded columns."""
    lines: list[str] = []
    for part in parts:
        if isinstance(part, str):
            lines.append(part)
            continue
        widths = [max(map(len, column)) for column in zip(part.head, *part.rows, strict=True)]
        lines.append("")
        for row in (part.head, *part.rows):
            cells = (
                cell.ljust(width) if i in part.left else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  ".join(cells).rstrip())
        lines.append("")
    return "\n".join(lines)


def rich(parts: Sequence[Block]) -> Any:
    """The same for a terminal (a rich renderable)."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    shown: list[Any] = []
    for part in parts:
        if isinstance(part, str):
            bad = part.startswith(("problem", "first error", "last error", "launcher"))
            shown.append(Text(part, style="red" if bad else ""))
            continue
        table = RichTable(title_justify="left")
        for i, name in enumerate(part.head):
            table.add_column(name, justify="left" if i in part.left else "right", overflow="fold")
        for row in part.rows:
            table.add_row(*(Text(cell, style="red" if cell == "no" else "") for cell in row))
        shown.append(table)
    return Group(*shown)
