"""Where a run stands by its ledger: what relax-status asks, of the newest lineage and in one moment of the file."""

import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from relax.ledger.queries import NoLedger, conservation, largest_staleness
from relax.ledger.states import Conservation, State

# Enough batches for a rate that follows changes without jumping.
RATE_BATCHES = 20
RATE_SECONDS = 60.0
# What happens now happens to the last groups that were drawn: a long ledger is not read for it as a whole.
RECENT_GROUPS = 100_000

_ENTERED = "coalesce(committed_at, ready_at, scored_at, sampled_at, issued_at, drawn_at)"
_OPEN = "FROM groups WHERE ended_at IS NULL AND lineage = (SELECT max(lineage) FROM lineages)"


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """Times are Unix seconds: when its draw began, and when it entered its state."""

    group: int
    attempt: int
    state: str
    holder: str | None
    location: str | None
    oldest: int | None
    drawn_at: float
    entered_at: float


@dataclass(frozen=True, slots=True)
class Stage:
    """The open groups in one state: how many, since when the first of them, and how many at each place (the replica
    that samples them, else the service that reported last; "" for those that nobody has)."""

    state: State
    groups: int
    since: float | None
    where: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LedgerView:
    """`committed` and `trained` are of the whole run, as are the batches whose largest `staleness` is given; groups and
    rates are of its present lineage. `trained` and `tokens` a second over the last batches, None before there are two;
    `sampled` over the last minute before `now`. `batch_seconds` is from one trained batch to the next."""

    lineage: int
    opened_at: float
    first_batch: int
    conservation: Conservation
    stages: tuple[Stage, ...]
    oldest: tuple[OpenGroup, ...]
    committed: int
    trained: int
    staleness: int | None
    trained_groups_per_s: float | None
    trained_tokens_per_s: float | None
    sampled_groups_per_s: float
    sampled_tokens_per_s: float
    batch_seconds: float | None
    stale_reports: Mapping[str, int]
    events: Mapping[str, int]
    newest_entry: float


def look(connection: sqlite3.Connection, now: float | None = None, oldest: int = 5) -> LedgerView:
    """Reads all of it in one transaction. `now` is in Unix seconds; by default the newest entry of the ledger, for a
    run that is over. Raises sqlite3.Error where the file is damaged, NoLedger where it is only begun."""
    connection.execute("BEGIN")
    try:
        return _look(connection, now, oldest)
    finally:
        connection.rollback()


def _look(connection: sqlite3.Connection, now: float | None, oldest: int) -> LedgerView:
    def ask(query: str, *values: object) -> list[tuple]:
        return connection.execute(query, values).fetchall()

    lineages = ask("SELECT lineage, opened_at, first_batch FROM lineages ORDER BY lineage DESC LIMIT 1")
    if not lineages:
        raise NoLedger("the ledger has no lineage: its controller ended while it made it, or is at it")
    lineage, opened_at, first_batch = lineages[0]
    ((last,),) = ask("SELECT max(group_id) FROM groups WHERE lineage = ?", lineage)
    recent = (lineage, (last or 0) - RECENT_GROUPS)
    ((newest,),) = ask(
        "SELECT max(max(coalesce(ended_at, 0), coalesce(committed_at, 0), coalesce(ready_at, 0), "
        "coalesce(scored_at, 0), coalesce(sampled_at, 0), coalesce(issued_at, 0), drawn_at)) "
        "FROM groups WHERE lineage = ? AND group_id > ?",
        *recent,
    )
    newest = opened_at if newest is None else newest
    until = newest if now is None else now
    batches = ask(
        "SELECT batch, size, trained_at FROM batches WHERE lineage = ? AND trained_at IS NOT NULL "
        "ORDER BY batch DESC LIMIT ?",
        lineage,
        RATE_BATCHES,
    )
    groups_rate = tokens_rate = batch_seconds = None
    if len(batches) > 1 and (seconds := batches[0][2] - batches[-1][2]) > 0:
        ((tokens,),) = ask(
            "SELECT total(tokens) FROM groups WHERE lineage = ? AND group_id > ? AND state = 'trained' AND batch > ?",
            *recent,
            batches[-1][0],
        )
        groups_rate, tokens_rate = sum(size for _, size, _ in batches[:-1]) / seconds, tokens / seconds
        batch_seconds = seconds / (len(batches) - 1)
    begin = max(until - RATE_SECONDS, opened_at)
    ((sampled, sampled_tokens),) = ask(
        "SELECT count(*), total(tokens) FROM groups WHERE lineage = ? AND group_id > ? AND sampled_at > ?",
        *recent,
        begin,
    )
    ((committed, trained),) = ask(
        "SELECT count(committed_at), count(trained_at) FROM batches WHERE lineage = ?", lineage
    )
    window = max(until - begin, 1e-9)
    return LedgerView(
        lineage=lineage,
        opened_at=opened_at,
        first_batch=first_batch,
        conservation=conservation(connection, lineage),
        stages=_stages(ask(f"SELECT state, holder, location, count(*), min({_ENTERED}) {_OPEN} GROUP BY 1, 2, 3")),
        oldest=tuple(
            OpenGroup(*row)
            for row in ask(
                f"SELECT group_id, attempt, state, holder, location, oldest, drawn_at, {_ENTERED} {_OPEN} "
                "ORDER BY drawn_at, group_id LIMIT ?",
                oldest,
            )
        ),
        committed=first_batch + committed,
        trained=first_batch + trained,
        staleness=largest_staleness(connection, lineage),
        trained_groups_per_s=groups_rate,
        trained_tokens_per_s=tokens_rate,
        sampled_groups_per_s=sampled / window,
        sampled_tokens_per_s=sampled_tokens / window,
        batch_seconds=batch_seconds,
        stale_reports=dict(ask("SELECT name, value FROM counters WHERE lineage = ? ORDER BY name", lineage)),
        events=dict(ask("SELECT event, count(*) FROM events WHERE lineage = ? GROUP BY event", lineage)),
        newest_entry=newest,
    )


def _stages(rows: list[tuple]) -> tuple[Stage, ...]:
    stages = []
    for state in State:
        mine = [row for row in rows if row[0] == state.word]
        if state in (State.TRAINED, State.DROPPED):
            continue
        where: Counter[str] = Counter()
        for _, holder, location, count, _ in mine:
            where[(holder if state is State.ISSUED else location) or ""] += count
        since = min((row[4] for row in mine), default=None)
        stages.append(Stage(state, where.total(), since, dict(where.most_common())))
    return tuple(stages)
