"""From the copy of a ledger in a checkpoint to the ledger of the lineage that goes on from there.

The copy is of any turn at which the trainer's version was the cut c or higher: `batch` of a group that ended is at
least the version at its end, so that what ended after the cut can be told, and is pending again as if it never had.
"""

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from relax.ledger.queries import read
from relax.ledger.revived import Revived, RevivedGroup
from relax.ledger.states import LedgerError

# The latest draw of every group of the lineage that is resumed; those of the lineages before it that went on were drawn
# again in it. A surplus group's prompt is a group of a higher id, drawn in the same turn with the same attempt.
_REVIVED = """
SELECT group_id, max(attempt), prompt_id, epoch, position, ended_at, batch, reason
FROM groups WHERE lineage = ? GROUP BY group_id
HAVING ended_at IS NULL OR (batch >= ? AND coalesce(reason, '') != 'surplus')
ORDER BY group_id
"""


def resume(path: Path, cut: int) -> Revived:
    """What a resume at batch `cut` goes on with, from the copy of the ledger in that checkpoint.

    Raises LedgerError when `path` is no ledger, is older than the cut, or begins after it.
    """
    with _readable(path), contextlib.closing(read(path)) as ledger:
        (parent, first_batch) = ledger.execute(
            "SELECT lineage, first_batch FROM lineages ORDER BY lineage DESC LIMIT 1"
        ).fetchone()
        if cut < first_batch:
            raise LedgerError(f"{path} is of lineage {parent}, which began at batch {first_batch}: no cut at {cut}")
        (trained,) = ledger.execute(
            "SELECT count(*) FROM batches WHERE lineage = ? AND batch >= ? AND batch < ? AND trained_at IS NOT NULL",
            (parent, first_batch, cut),
        ).fetchone()
        if trained != cut - first_batch:
            raise LedgerError(
                f"{path} knows of {trained} trained batches from {first_batch} on, a cut at {cut} needs "
                f"{cut - first_batch}: the copy is older than the checkpoint"
            )
        groups = tuple(RevivedGroup(*row[:5]) for row in ledger.execute(_REVIVED, (parent, cut)))
        (last_group,) = ledger.execute("SELECT coalesce(max(group_id), -1) FROM groups").fetchone()
        last = ledger.execute("SELECT epoch, position FROM groups ORDER BY epoch DESC, position DESC").fetchone()
    epoch, index = (0, 0) if last is None else (last[0], last[1] + 1)
    return Revived(parent, cut, groups, last_group, epoch, index)


def reopen(copy: Path, path: Path, *, cut: int, lineage: int) -> None:
    """Puts the copy of a checkpoint in the place of the run's ledger at `path`, with `lineage` opened at batch `cut`.

    What is at `path` (the ledger of the life that ended, with turns after the cut) is kept as
    ledger.before-<lineage>.sqlite. A crash leaves the one or the other at `path`, or none; to be called again with a
    higher lineage. Raises LedgerError when the copy has that lineage already, or the disk refuses.
    """
    aside = path.with_name(f".{path.name}.{lineage}")
    try:
        aside.unlink(missing_ok=True)
        shutil.copyfile(copy, aside)
        with _readable(copy), contextlib.closing(sqlite3.connect(aside, isolation_level=None)) as ledger:
            ledger.execute("PRAGMA synchronous = FULL")
            (parent,) = ledger.execute("SELECT max(lineage) FROM lineages").fetchone()
            if lineage <= parent:
                raise LedgerError(f"{copy} knows lineage {parent}: lineage {lineage} cannot be opened after it")
            ledger.execute("INSERT INTO lineages VALUES (?, ?, ?, ?)", (lineage, parent, cut, time.time()))
        with aside.open("rb+") as file:
            os.fsync(file.fileno())
        set_aside(path, lineage)
        aside.rename(path)
    except OSError as error:
        raise LedgerError(f"{path} cannot be replaced by {copy}: {error}") from error
    finally:
        aside.unlink(missing_ok=True)


def set_aside(path: Path, lineage: int) -> None:
    """Keeps the ledger of the life before `lineage`, if there is one, as ledger.before-<lineage>.sqlite."""
    # The log goes first: one that stayed behind would be taken for the new ledger's.
    for end in ("-shm", "-wal", ""):
        part = path.with_name(path.name + end)
        if part.exists():
            part.rename(path.with_name(f"{path.stem}.before-{lineage}{path.suffix}{end}"))


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise LedgerError(f"{path} cannot be read: {error}") from error
