"""The ledger on disk: SQLite in WAL mode, written by one thread."""

import os
import sqlite3
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from relax.ledger import schema
from relax.ledger.changes import Changes
from relax.ledger.copying import copy_ledger
from relax.ledger.states import LedgerError


@dataclass(frozen=True, slots=True)
class _Backup:
    """A copy that is asked for, in its place among the turns."""

    path: Path
    end: float  # monotonic seconds
    done: Future[None] = field(default_factory=Future)


class _GivenUpError(Exception):
    """The copy takes too long, or the ledger closes."""


class Ledger:
    """A ledger file and the thread that writes it: a new one, or with `Ledger.reopened` one that a resume has prepared.

    `write` queues one turn's changes and returns at once; the thread takes all that wait into one transaction. The
    queue is bounded by `room` turns: the one producer asks `has_room` first and keeps its changes while there is none.
    Synchronous NORMAL: a crash of the process loses nothing written, a power cut at most the last moments, and never
    consistency.

    Raises LedgerError if `path` exists (a run directory belongs to one run) or cannot be made. A write that fails (disk
    full) ends the thread; every later call raises LedgerError with the cause, and so does one after `stall_timeout`
    seconds without room.
    """

    def __init__(
        self,
        path: Path,
        *,
        run_id: str = "",
        lineage: int = 0,
        first_batch: int = 0,
        room: int = 256,
        stall_timeout: float = 60.0,
        create: bool = True,
    ) -> None:
        self.path = Path(path)
        self._room = room
        self._stall_timeout = stall_timeout
        self._full_since: float | None = None
        self._queue: deque[Changes | _Backup] = deque()
        self._changed = threading.Condition()
        self._submitted = 0
        self._written = 0
        self._closing = False
        self._failure: Exception | None = None
        connect = _create if create else _open
        self._connection = connect(self.path, run_id, lineage, first_batch, stall_timeout)
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    @classmethod
    def reopened(cls, path: Path, *, run_id: str, lineage: int, first_batch: int) -> Self:
        """The ledger that `relax.ledger.resume.reopen` has put at `path`, in which `lineage` begins at `first_batch`.

        Raises LedgerError when it is another's.
        """
        return cls(path, run_id=run_id, lineage=lineage, first_batch=first_batch, create=False)

    def has_room(self) -> bool:
        """Whether `write` would take another turn now."""
        self._raise_failure()
        if len(self._queue) < self._room:
            self._full_since = None
            return True
        now = time.monotonic()
        self._full_since = self._full_since or now
        if now - self._full_since > self._stall_timeout:
            raise LedgerError(
                f"{self.path} has not been written for {now - self._full_since:.0f} s "
                f"({len(self._queue)} turns wait): is its disk, which must be local, stuck?"
            )
        return False

    def write(self, changes: Changes) -> None:
        """Queues one turn. Raises LedgerError when there is no room, the ledger failed or is closed."""
        self._raise_failure()
        with self._changed:
            if self._closing:
                raise LedgerError(f"{self.path} is closed")
            if len(self._queue) >= self._room:
                raise LedgerError(f"{self.path} has {len(self._queue)} turns waiting: no room for another")
            self._queue.append(changes)
            self._submitted += 1
            self._changed.notify_all()

    def begin_backup(self, path: Path, deadline: float) -> Future[None]:
        """A copy of the ledger to the new file `path`, as it is after the turns written so far and before the next.

        The copy is one file. Turns go on being written while it is made. The result is LedgerError when it was not made
        within `deadline` seconds or could not be written; the ledger itself is none the worse for it.
        """
        self._raise_failure()
        backup = _Backup(Path(path), time.monotonic() + deadline)
        with self._changed:
            if self._closing:
                raise LedgerError(f"{self.path} is closed")
            self._queue.append(backup)
            self._changed.notify_all()
        return backup.done

    def backup(self, path: Path, deadline: float) -> None:
        """As `begin_backup`, and waits for it."""
        self.begin_backup(path, deadline).result(deadline + self._stall_timeout)

    def flush(self, deadline: float) -> None:
        """Waits until all that was queued is written; LedgerError after `deadline` seconds."""
        with self._changed:
            target = self._submitted
            if not self._changed.wait_for(lambda: self._written >= target or self._failure is not None, deadline):
                behind = target - self._written
                raise LedgerError(f"{self.path} has not been written after {deadline:g} s: {behind} turns wait")
        self._raise_failure()

    def close(self, deadline: float = 10.0) -> None:
        """Writes what is queued, then ends the thread. LedgerError if that failed or took longer than `deadline` s."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(deadline)
        if self._thread.is_alive():
            raise LedgerError(f"{self.path} could not be closed within {deadline:g} s: {len(self._queue)} turns wait")
        self._raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise LedgerError(f"{self.path} cannot be written: {self._failure}") from self._failure

    def _run(self) -> None:
        try:
            while work := self._take():
                if isinstance(work, _Backup):
                    if work.done.set_running_or_notify_cancel():  # its asker may have ended
                        self._back_up(work)
                else:
                    self._write(work)
        except Exception as error:  # whatever it is, the owner must hear of it
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self._connection.close()
            self._give_up_backups()

    def _write(self, turns: list[Changes]) -> None:
        with self._connection:  # one transaction
            for changes in turns:
                _apply(self._connection, changes)
        with self._changed:
            self._written += len(turns)
            self._changed.notify_all()

    def _take(self) -> list[Changes] | _Backup | None:
        """All turns that wait up to the next copy that is asked for, or that one; None once the ledger is closing and
        nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            return self._pop()

    def _pop(self) -> list[Changes] | _Backup | None:
        if not self._queue:
            return None
        if isinstance(self._queue[0], _Backup):
            return self._queue.popleft()  # type: ignore[return-value]
        turns: list[Changes] = []
        while self._queue and isinstance(changes := self._queue[0], Changes):
            turns.append(changes)
            self._queue.popleft()
        return turns

    def _back_up(self, backup: _Backup) -> None:
        """Copies a snapshot of this moment, in steps between which waiting turns are written."""

        def between(status: int, remaining: int, total: int) -> None:
            with self._changed:
                if self._closing:
                    raise _GivenUpError("the ledger was closed meanwhile")
                turns = self._pop() if self._queue and isinstance(self._queue[0], Changes) else None
            if time.monotonic() > backup.end:
                raise _GivenUpError("its time was over")
            if turns:
                assert isinstance(turns, list)
                try:
                    self._write(turns)
                except Exception as error:
                    # This is the ledger's own failure; the copy fails beside it.
                    self._failure = error
                    raise

        try:
            copy_ledger(self.path, backup.path, between)
        except Exception as error:  # the asker acts on it
            backup.done.set_exception(LedgerError(f"{self.path} could not be copied to {backup.path}: {error}"))
            if self._failure is not None:
                raise
        else:
            backup.done.set_result(None)

    def _give_up_backups(self) -> None:
        with self._changed:
            left = [item for item in self._queue if isinstance(item, _Backup)]
        for backup in left:
            if not backup.done.set_running_or_notify_cancel():
                continue
            backup.done.set_exception(LedgerError(f"{self.path} ended before it was copied to {backup.path}"))


def _create(path: Path, run_id: str, lineage: int, first_batch: int, timeout: float) -> sqlite3.Connection:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        raise LedgerError(f"{path} exists: it is the ledger of another run. Choose another --run-dir") from None
    except OSError as error:
        raise LedgerError(f"{path} cannot be created: {error.strerror}") from error
    now = time.time()
    meta = {"schema_version": str(schema.SCHEMA_VERSION), "run_id": run_id, "created_at": repr(now)}
    # Made here so that errors reach the caller; from then on only the writer thread uses the connection. The timeout is
    # for a tool that holds the write lock; readers never block the writer.
    connection = sqlite3.connect(path, timeout=timeout, check_same_thread=False)
    try:
        connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;" + schema.SCHEMA)
        with connection:
            connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            connection.execute("INSERT INTO lineages VALUES (?, NULL, ?, ?)", (lineage, first_batch, now))
    except sqlite3.Error as error:
        connection.close()
        raise LedgerError(f"{path} cannot be created: {error}") from error
    return connection


def _open(path: Path, run_id: str, lineage: int, first_batch: int, timeout: float) -> sqlite3.Connection:
    if not path.is_file():
        raise LedgerError(f"{path} does not exist: there is nothing to go on with")
    connection = sqlite3.connect(path, timeout=timeout, check_same_thread=False)
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version != schema.SCHEMA_VERSION:
            raise LedgerError(f"{path} has ledger schema {version}, this Relax writes {schema.SCHEMA_VERSION}")
        (owner,) = connection.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
        newest = connection.execute("SELECT lineage, first_batch FROM lineages ORDER BY lineage DESC").fetchone()
        if (owner, *newest) != (run_id, lineage, first_batch):
            found = f"run {owner!r}, lineage {newest[0]} from batch {newest[1]}"
            raise LedgerError(f"{path} holds {found}; expected run {run_id!r}, lineage {lineage} from {first_batch}")
        connection.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;")
    except sqlite3.Error as error:
        connection.close()
        raise LedgerError(f"{path} cannot be opened: {error}") from error
    except LedgerError:
        connection.close()
        raise
    return connection


def _apply(connection: sqlite3.Connection, changes: Changes) -> None:
    for statement, rows in (
        (schema.UPSERT_GROUP, changes.groups),
        (schema.UPSERT_BATCH, changes.batches),
        (schema.UPSERT_VERSION, changes.versions),
        (schema.INSERT_EVENT, changes.events),
        (schema.UPSERT_COUNTER, changes.counters),
    ):
        if rows:
            connection.executemany(statement, rows)
