"""The earliest error of a run: what went wrong first, not what fell over because of it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from relax.launch.rundir import RunDir
from relax.logs.show import message

TAIL_LINES = 30
TAIL_BYTES = 65536


@dataclass(frozen=True, slots=True)
class FirstError:
    time: datetime
    service: str
    text: str
    file: Path

    def __str__(self) -> str:
        lines = "\n".join("    " + line for line in self.text.splitlines())
        return f"first error of the run: {self.service} at {self.time:%H:%M:%S.%f} UTC ({self.file})\n{lines}"


def first_error(run: RunDir, ended_at: Mapping[str, datetime], failed: tuple[str, ...] = ()) -> FirstError | None:
    """The earliest error record of all logs, or what a failed service that logged none wrote to its output.

    `ended_at` has the end of each process; one that died before it could log an error is known by its output alone.
    """
    found = list(_logged(run))
    have_logged = {error.service for error in found}
    for service in failed:
        if service not in have_logged and service in ended_at:
            file = run.out(service)
            text = tail(file) or "(it wrote nothing)"
            found.append(FirstError(ended_at[service], service, text, file))
    return min(found, key=lambda error: error.time, default=None)


def tail(file: Path) -> str:
    """The last lines of a file, without those that are empty."""
    if not file.is_file():
        return ""
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - TAIL_BYTES))
        lines = opened.read().decode("utf-8", "replace").splitlines()
    return "\n".join([line for line in lines if line.strip()][-TAIL_LINES:])


def _logged(run: RunDir) -> Iterator[FirstError]:
    for file in sorted(run.logs_dir.glob("*.jsonl")):
        for record in _errors(file):
            yield FirstError(
                datetime.fromisoformat(record["time"]), str(record.get("service", file.stem)), message(record), file
            )
            break


def _errors(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            # Cheap before exact: most lines are no errors, and logs may be long.
            if '"error"' not in line and '"critical"' not in line:
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # the last line of a process that was killed while writing
                continue
            if record.get("level") in ("error", "critical") and "time" in record:
                yield record
