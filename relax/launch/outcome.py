"""How a launcher's run ended, kept in the run directory as a log of the launcher's own."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime

from relax.launch.rundir import RunDir
from relax.logs.setup import render_json

EVENT = "run_ended"


@dataclass(frozen=True, slots=True)
class Ended:
    """`code` is the launcher's exit code, `text` why, `first_error` its line on the earliest error of the run."""

    time: datetime
    code: int
    text: str
    first_error: str = ""


def record(run: RunDir, node: str | None, ended: Ended) -> None:
    """Appends a line to `logs/launcher.jsonl`, of a node's launcher to `logs/launcher.<node>.jsonl`.

    No error by its level: it tells what happened, it did not happen first. Raises OSError.
    """
    name = f"launcher.{node}" if node else "launcher"
    line = {
        "time": ended.time.isoformat(timespec="microseconds"),
        "level": "warning" if ended.code else "info",
        "service": name,
        "event": EVENT,
        "run": run.run_id,
        "lineage": run.lineage,
        "code": ended.code,
        "outcome": ended.text,
        "first_error": ended.first_error,
    }
    with run.log(name).open("a") as file:
        file.write(render_json(None, "", line) + "\n")


def last(run: RunDir) -> Ended | None:
    """The worst of what the launchers of this host said last of the run's present life; None where none has come to its
    end."""
    files = sorted(run.logs_dir.glob("launcher*.jsonl"))
    ends = [ended for file in files if (ended := _last(file.read_bytes(), run.lineage))]
    return max(ends, key=lambda ended: (ended.code != 0, ended.time), default=None)


def _last(lines: bytes, lineage: int) -> Ended | None:
    for line in reversed(lines.splitlines()):
        try:
            data = json.loads(line)
            if data["event"] == EVENT and data["lineage"] == lineage:
                time = datetime.fromisoformat(data["time"]).astimezone(UTC)
                return Ended(time, int(data["code"]), str(data["outcome"]), str(data["first_error"]))
        except (ValueError, KeyError, TypeError):  # torn by a kill
            continue
    return None
