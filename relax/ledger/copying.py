"""A copy of a ledger that is being written."""

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

# Pages (of 4 KiB) copied between two looks at what waits: some milliseconds.
PAGES = 256


def copy_ledger(path: Path, to: Path, between: Callable[[int, int, int], object] | None = None) -> None:
    """A snapshot of the ledger at `path` as it is now; the new file `to` needs no other beside it.

    `between` is called after every PAGES pages; what it raises ends the copy. It may write to the ledger meanwhile,
    through another connection.
    """
    if to.exists():
        raise FileExistsError(f"{to} exists")
    to.parent.mkdir(parents=True, exist_ok=True)
    with (
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as source,
        contextlib.closing(sqlite3.connect(to, isolation_level=None)) as target,
    ):
        # An open read transaction is a snapshot in WAL mode: what is written meanwhile does not restart the copy.
        source.execute("BEGIN")
        source.execute("SELECT count(*) FROM meta").fetchone()
        source.backup(target, pages=PAGES, progress=between, sleep=0)
        # The copy says of itself that it has a write-ahead log, as its source does.
        target.execute("PRAGMA journal_mode = DELETE")
