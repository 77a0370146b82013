"""Reading metrics.jsonl, while it is written or afterwards.

A run that was resumed has trained some batches twice: the life that came later counts, and its row of batch b also
voids what the one before wrote of later batches, which it has yet to come to. Everybody who reads rows reads them here.
"""

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Tail:
    """Reads the rows that were appended since the last look, at first those from `offset` on; a line still being
    written waits. Raises OSError."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset

    def read(self) -> list[Row]:
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole, newline, _ = data.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return [row for line in whole.split(b"\n") if (row := _row(line)) is not None]


class History:
    """The rows that count, in the order of their batches; the last `keep` of them, or all."""

    def __init__(self, keep: int | None = None) -> None:
        self._rows: deque[Row] = deque(maxlen=keep)

    def add(self, row: Row) -> None:
        """The next line of the file."""
        self.begin(int(row["batch"]))
        self._rows.append(row)

    def begin(self, cut: int) -> None:
        """A life begins at batch `cut`: what was written of it and later ones does not count any more."""
        while self._rows and self._rows[-1]["batch"] >= cut:
            self._rows.pop()

    @property
    def newest(self) -> Row:
        """Raises IndexError where there is none."""
        return self._rows[-1]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def read_rows(path: Path) -> list[Row]:
    """The rows of a run that count; none where there is no file yet. Raises OSError."""
    history = History()
    for row in Tail(path).read():
        history.add(row)
    return list(history)


def end_of_rows(path: Path) -> int:
    """Where the rows of the lives before end. A line that a killed one was writing is cut off by the next."""
    return path.read_bytes().rfind(b"\n") + 1 if path.is_file() else 0


def _row(line: bytes) -> Row | None:
    """A row of metrics; None for anything else, for a reader must never end the run it looks at."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("batch"), int) else None
