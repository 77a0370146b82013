"""The errors in the logs of a run, by service: the last one of each, and which came first."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax.logs.show import message


@dataclass(frozen=True, slots=True)
class LoggedError:
    """`time` is ISO 8601 in UTC, as in the log; `text` one line; `count` how many errors the service logged."""

    time: str
    service: str
    text: str
    count: int
    first: bool = False


class ErrorLogs:
    """Reads what was appended to the logs since the last look; a line that is still being written waits.

    Memory is one record a service, however long the logs.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self._last: dict[str, LoggedError] = {}
        self._first: LoggedError | None = None

    def read(self) -> list[LoggedError]:
        """The last error of each service, and the first of all (marked) unless it is among them; by time."""
        for file in sorted(self._directory.glob("*.jsonl")):
            for record in self._new(file):
                service = str(record.get("service", file.stem))
                before = self._last.get(service)
                text = message(record).partition("\n")[0]
                error = LoggedError(str(record["time"]), service, text, 1 if before is None else before.count + 1)
                if before is None or before.time <= error.time:
                    self._last[service] = error
                if self._first is None or error.time < self._first.time:
                    self._first = error
        first = self._first
        others = [e for e in self._last.values() if first is None or (e.time, e.service) != (first.time, first.service)]
        if first is None:
            return []
        count = self._last[first.service].count
        marked = LoggedError(first.time, first.service, first.text, count, first=True)
        return [marked, *sorted(others, key=lambda error: error.time)]

    def _new(self, file: Path) -> Iterator[dict[str, Any]]:
        offset = self._offsets.get(file, 0)
        with file.open("rb") as opened:
            opened.seek(offset)
            for line in opened:
                if not line.endswith(b"\n"):
                    break
                offset += len(line)
                # Cheap before exact: most lines are no errors, and logs may be long.
                if b'"error"' in line or b'"critical"' in line:
                    record = _record(line)
                    if record is not None:
                        yield record
        self._offsets[file] = offset


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # torn by a kill
        return None
    wanted = isinstance(record, dict) and record.get("level") in ("error", "critical") and "time" in record
    return record if wanted else None
