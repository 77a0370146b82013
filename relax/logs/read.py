"""Reading the logs of a run: merged by time, filtered, and followed while services still write."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

LEVELS = ("debug", "info", "warning", "error", "critical")
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Record:
    """One log line: the object it holds and the text it was."""

    data: Mapping[str, Any]
    text: str

    @property
    def time(self) -> str:
        return str(self.data.get("time", ""))


@dataclass(frozen=True, slots=True)
class Filter:
    """Which records to show. Empty means all. `services` are names or patterns (`*-0`, `rollout`: every replica);
    `where` compares fields as text, so `batch=3` finds the number 3."""

    services: tuple[str, ...] = ()
    level: str = "debug"
    where: tuple[tuple[str, str], ...] = ()

    def accepts(self, record: Record) -> bool:
        data = record.data
        service, level = str(data.get("service", "")), str(data.get("level", "info"))
        if self.services and not any(_matches(service, pattern) for pattern in self.services):
            return False
        if level in LEVELS and LEVELS.index(level) < LEVELS.index(self.level):
            return False
        return all(key in data and _same(data[key], value) for key, value in self.where)


def _matches(service: str, pattern: str) -> bool:
    """`actor.rank1` belongs to the service `actor`, `rollout-0` to the role `rollout`."""
    name = service.partition(".")[0]
    return fnmatchcase(service, pattern) or pattern in (name, name.rpartition("-")[0])


def _same(seen: object, wanted: str) -> bool:
    """Strings as they are, everything else as JSON; a list holds what any of its items is."""
    if isinstance(seen, list):
        return any(_same(item, wanted) for item in seen)
    return (seen if isinstance(seen, str) else json.dumps(seen)) == wanted


class LogFiles:
    """The log files of a directory, those that appear later included. Each `read` returns the records that were
    completed since the last one, ordered by time; `torn` counts lines that were no JSON object."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.torn = 0
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[Record]:
        records = [record for file in sorted(self.directory.glob("*.jsonl")) for record in self._new(file)]
        # Stable: lines of one file with one time keep their order.
        return sorted(records, key=lambda record: record.time)

    def _new(self, file: Path) -> Iterator[Record]:
        with file.open("rb") as opened:
            opened.seek(self._offsets.get(file, 0))
            whole, newline, _ = opened.read().rpartition(b"\n")
        self._offsets[file] = self._offsets.get(file, 0) + len(whole) + len(newline)
        # Split at newlines only: JSON strings may hold other line separators.
        for line in whole.split(b"\n"):
            if line.strip():
                record = self._parse(line.decode("utf-8", "replace"))
                if record is not None:
                    yield record

    def _parse(self, text: str) -> Record | None:
        try:
            data = json.loads(text)
        except json.JSONDecodeError:
            data = None
        if not isinstance(data, dict):
            self.torn += 1
            return None
        return Record(data, text)


def follow(files: LogFiles, sleep: Callable[[float], None] = time.sleep) -> Iterator[Record]:
    """Records as they are written, for ever.

    What one poll finds waits for the next before it is shown, so that services whose lines arrive a little late still
    come in order of time.
    """
    held: list[Record] = []
    while True:
        fresh = files.read()
        ready, held = held, fresh
        if ready and fresh:
            merged = sorted([*ready, *fresh], key=lambda record: record.time)
            limit = max(record.time for record in ready)
            ready = [record for record in merged if record.time <= limit]
            held = [record for record in merged if record.time > limit]
        yield from ready
        sleep(POLL_SECONDS)
