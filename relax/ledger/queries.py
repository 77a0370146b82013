"""Questions to a ledger file, for status, tests and people; the run may be writing it meanwhile."""

import sqlite3
from pathlib import Path

from relax.ledger.schema import SCHEMA_VERSION
from relax.ledger.states import Conservation, LedgerError, State, Whereabouts

# The lineages that one consists of (default: the newest), itself first: of an older one only what it did before batch
# `below` is inherited.
_CHAIN = """
WITH RECURSIVE chain (lineage, below) AS (
    SELECT coalesce(?, max(lineage)), NULL FROM lineages
    UNION ALL
    SELECT l.parent, min(coalesce(chain.below, l.first_batch), l.first_batch)
    FROM chain JOIN lineages l ON l.lineage = chain.lineage WHERE l.parent IS NOT NULL
)
"""


class NoLedger(LedgerError):
    """There is no ledger, or its controller is just making it."""


def read(path: Path) -> sqlite3.Connection:
    """Opens a ledger read-only. LedgerError if it is missing (NoLedger), damaged or of another schema."""
    if not Path(path).is_file():
        raise NoLedger(f"{path} does not exist: not a run directory, or its controller never started")
    connection = sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error as error:
        connection.close()
        raise LedgerError(f"{path} cannot be read: {error}") from None
    if version != SCHEMA_VERSION:
        connection.close()
        if version == 0:
            raise NoLedger(f"{path} has no tables of a ledger: its controller ended while it made them, or it is none")
        raise LedgerError(f"{path} has ledger schema {version}, this Relax reads {SCHEMA_VERSION}")
    return connection


def conservation(connection: sqlite3.Connection, lineage: int | None = None) -> Conservation:
    """The counts of one lineage (default the newest) as they are on disk."""
    draws = connection.execute(
        "SELECT state, coalesce(reason, ''), count(*) FROM groups "
        "WHERE first_issued_at IS NOT NULL AND lineage = coalesce(?, (SELECT max(lineage) FROM lineages)) "
        "GROUP BY state, reason",
        (lineage,),
    ).fetchall()
    trained = sum(n for state, _, n in draws if state == State.TRAINED.word)
    dropped = {reason: n for state, reason, n in draws if state == State.DROPPED.word}
    flying = {State[state.upper()]: n for state, _, n in draws if state not in (State.TRAINED.word, State.DROPPED.word)}
    return Conservation(sum(n for _, _, n in draws), trained, dropped, flying)


def trained_prompts(connection: sqlite3.Connection, lineage: int | None = None) -> list[tuple[int, int]]:
    """(prompt id, epoch) of every group that a lineage (default the newest) trained or inherited, in order of batch and
    group."""
    return connection.execute(
        _CHAIN + "SELECT g.prompt_id, g.epoch FROM chain JOIN groups g USING (lineage) "
        "WHERE g.state = 'trained' AND (chain.below IS NULL OR g.batch < chain.below) ORDER BY g.batch, g.group_id",
        (lineage,),
    ).fetchall()


def largest_staleness(connection: sqlite3.Connection, lineage: int | None = None) -> int | None:
    """Of any batch that a lineage (default the newest) committed or inherited; None before the first."""
    ((largest,),) = connection.execute(
        _CHAIN + "SELECT max(b.batch - b.oldest) FROM chain JOIN batches b USING (lineage) "
        "WHERE chain.below IS NULL OR b.batch < chain.below",
        (lineage,),
    ).fetchall()
    return None if largest is None else int(largest)


def whereabouts(connection: sqlite3.Connection, lineage: int | None = None) -> Whereabouts:
    """What became of every group that a lineage (default the newest) and those it inherits from ever drew."""
    drawn = connection.execute(
        _CHAIN + "SELECT count(DISTINCT group_id) FROM chain JOIN groups USING (lineage)", (lineage,)
    ).fetchone()[0]
    # The last word on a group: its latest draw in the youngest lineage that counts for it.
    ends = connection.execute(
        _CHAIN + "SELECT g.state, coalesce(g.reason, ''), count(*) FROM chain JOIN groups g USING (lineage) "
        "WHERE (chain.below IS NULL OR (g.ended_at IS NOT NULL AND (g.batch < chain.below OR g.reason = 'surplus'))) "
        "AND g.attempt = "
        "(SELECT max(attempt) FROM groups o WHERE o.lineage = g.lineage AND o.group_id = g.group_id) GROUP BY 1, 2",
        (lineage,),
    ).fetchall()
    over = (State.TRAINED.word, State.DROPPED.word)
    return Whereabouts(
        drawn,
        sum(n for state, _, n in ends if state == State.TRAINED.word),
        {reason: n for state, reason, n in ends if state == State.DROPPED.word},
        sum(n for state, _, n in ends if state not in over),
    )


def oldest_open(connection: sqlite3.Connection, limit: int = 10) -> list[tuple[int, int, str, str | None, float]]:
    """(group, attempt, state, location, drawn at) of the open groups of the newest lineage, longest under way first."""
    return connection.execute(
        "SELECT group_id, attempt, state, location, drawn_at FROM groups "
        "WHERE ended_at IS NULL AND lineage = (SELECT max(lineage) FROM lineages) ORDER BY drawn_at, group_id LIMIT ?",
        (limit,),
    ).fetchall()
