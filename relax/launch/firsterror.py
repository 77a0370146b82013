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
    """`text` is one line; `details` (a traceback, the last output) may be many or none."""

    time: datetime
    service: str
    text: str
    details: str
    file: Path

    def __str__(self) -> str:
        """The details above, the line that tells what happened last."""
        return "".join(f"    {line}\n" for line in self.details.splitlines()) + self.line

    @property
    def line(self) -> str:
        return f"first error of the run: {self.service} at {self.time:%H:%M:%S} UTC: {self.text} ({self.file})"


def first_error(
    run: RunDir,
    ended_at: Mapping[str, datetime],
    failed: Mapping[str, str],
    since: Mapping[str, datetime],
    began: datetime | None = None,
) -> FirstError | None:
    """The earliest error record of all logs, or the end of a failed service that logged none.

    `ended_at` has the end of each process, `failed` how those to blame ended. One that died before it could log an
    error is known by that and by its output. `since` says from when on the errors of a service count, if not all do
    from where the run `began` (None: wherever), which may go on in the logs of a life before.
    """
    found = list(_logged(run, since, began))
    have_logged = {error.service for error in found}
    for service, how in failed.items():
        if service not in have_logged and service in ended_at:
            file = run.out(service)
            found.append(FirstError(ended_at[service], service, how, tail(file), file))
    return min(found, key=lambda error: error.time, default=None)


def tail(file: Path) -> str:
    """The last lines of a file, without those that are empty."""
    if not file.is_file():
        return ""
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - TAIL_BYTES))
        lines = opened.read().decode("utf-8", "replace").splitlines()
    return "\n".join([line for line in lines if line.strip()][-TAIL_LINES:])


def _logged(run: RunDir, since: Mapping[str, datetime], began: datetime | None) -> Iterator[FirstError]:
    for file in sorted(run.logs_dir.glob("*.jsonl")):
        begin = since.get(file.stem, began)
        for record in _errors(file):
            text, _, details = message(record).partition("\n")
            time = datetime.fromisoformat(record["time"])
            if begin is not None and time < begin:
                continue
            yield FirstError(time, str(record.get("service", file.stem)), text, details, file)
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
