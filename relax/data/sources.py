"""Prompt sources: rows by index, whatever file or generator they come from.

A row is a JSON-compatible dict, because it travels to the reward workers as JSON. `prompt_id` everywhere in Relax is
the index of the row in its source, so it survives shuffling, restarts and resumes.
"""

import datetime
import decimal
import json
import mmap
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from relax.data.errors import DataError

Row = dict[str, Any]
REASONING_GYM = "reasoning_gym:"


class PromptSource(Protocol):
    """Random access to the rows of a dataset; `where(i)` names row i for messages (file and line)."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row: ...

    def where(self, index: int) -> str: ...


def open_source(spec: str, *, seed: int) -> PromptSource:
    """The source named by `--prompt-data`.

    `spec` is the path of a `.jsonl` or `.parquet` file, or `reasoning_gym:<task>[?key=value&...]`. `seed` feeds a
    generated dataset that names none itself. Raises `DataError` for whatever cannot be opened.
    """
    if spec.startswith(REASONING_GYM):
        from relax.data.generated import ReasoningGymSource

        return ReasoningGymSource(spec, seed=seed)
    path = Path(spec)
    try:
        there = path.exists()
    except OSError as error:  # a name that is too long
        raise DataError(f"prompt data {spec!r} cannot be looked up: {error.strerror}", _CHOICES) from None
    if not there:
        raise DataError(f"prompt data {spec!r}: no such file (looked in {Path.cwd()})", _CHOICES)
    if not path.is_file():
        raise DataError(f"prompt data {spec!r} is a directory", _CHOICES)
    if path.suffix in (".jsonl", ".ndjson", ".json"):
        return JsonlSource(path)
    if path.suffix == ".parquet":
        return ParquetSource(path)
    raise DataError(f"prompt data {spec!r}: unknown file type {path.suffix!r}", _CHOICES)


_CHOICES = "Give a .jsonl file, a .parquet file or reasoning_gym:<task>."


class JsonlSource:
    """One JSON object a line; blank lines are skipped. Holds line offsets, not rows, so the file may exceed memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.stat().st_size == 0:
            raise DataError(f"prompt data {path} is empty", "Write one JSON object a line into it.")
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._starts, self._lines = _index_lines(self._bytes)
        if len(self._starts) == 0:
            raise DataError(f"prompt data {path} has only blank lines", "Write one JSON object a line into it.")

    def __len__(self) -> int:
        return len(self._starts)

    def where(self, index: int) -> str:
        return f"{self._path} line {self._lines[index]}"

    def row(self, index: int) -> Row:
        start = int(self._starts[index])
        end = self._bytes.find(b"\n", start)
        text = self._bytes[start : end if end >= 0 else len(self._bytes)]
        try:
            row = json.loads(text.decode("utf-8-sig"))
        except ValueError as error:
            shown = text[:80].decode("utf-8", "replace").strip()
            problem = f"{self.where(index)} is not JSON: {error} in {shown!r}"
            raise DataError(problem, "Every line must hold one JSON object.") from None
        if not isinstance(row, dict):
            problem = f"{self.where(index)} holds a JSON {type(row).__name__}"
            raise DataError(problem, "Every line must hold one JSON object with named fields.")
        return row

    def bytes_up_to(self, index: int) -> int:
        """Bytes of the file before the line of row `index`."""
        return int(self._starts[index])


def _index_lines(data: mmap.mmap) -> tuple[np.ndarray, np.ndarray]:
    """Offsets (int64) and 1-based numbers (int64) of the lines that are not blank."""
    starts: list[int] = []
    lines: list[int] = []
    position, number = 0, 0
    data.seek(0)
    while line := data.readline():
        number += 1
        if line.strip():
            starts.append(position)
            lines.append(number)
        position += len(line)
    return np.array(starts, dtype=np.int64), np.array(lines, dtype=np.int64)


class ParquetSource:
    """A Parquet file as an Arrow table, memory-mapped. Dates, times and decimals become text; binary is refused."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self._path = path
        try:
            self._table = pyarrow.parquet.read_table(path, memory_map=True)
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"prompt data {path} is not a Parquet file: {error}", _CHOICES) from None
        if self._table.num_rows == 0:
            raise DataError(f"prompt data {path} is empty", "It needs at least one row.")
        for field in self._table.schema:
            if pyarrow.types.is_binary(field.type) or pyarrow.types.is_large_binary(field.type):
                raise DataError(f"prompt data {path}: column {field.name!r} is binary", "Drop this column.")

    def __len__(self) -> int:
        return self._table.num_rows

    def where(self, index: int) -> str:
        return f"{self._path} row {index + 1}"

    def row(self, index: int) -> Row:
        (row,) = self._table.slice(index, 1).to_pylist()
        return {key: _plain(value) for key, value in row.items()}


def _plain(value: Any) -> Any:
    """`value` with what JSON does not have (dates, times, decimals) as text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    return value
