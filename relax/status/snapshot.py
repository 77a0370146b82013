"""status.json: what the controller alone knows of a run; the rest is in the ledger, the metrics and the logs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

SCHEMA = 1


class SnapshotError(ValueError):
    """A status.json that is no snapshot; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A service as the controller saw it last. Times are Unix seconds.

    `local`: it is on the controller's host, where `pid` means something. `lives`: how many processes have had this name
    in the lineage. `gone`: it is no member any more. The last three are of rollout replicas: the version they serve
    (None before the first), the groups they sample, and those they keep for the stages after them.
    """

    name: str
    role: str
    node: str
    pid: int
    incarnation: str
    local: bool
    joined: float
    heard: float
    activity: str
    rss_bytes: float | None
    lives: int = 1
    gone: bool = False
    version: int | None = None
    sampling: int | None = None
    keeps: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`time` and `moved` (the last sign of progress) are Unix seconds. `code` is the controller's exit code, None while
    the run goes on. `batches` is their number, None while it is unknown. `waits` is what the next commit waits for,
    `missing` the roles that nobody has taken yet. The first of `services` is the controller."""

    run_id: str
    lineage: int
    host: str
    time: float
    moved: float
    code: int | None
    batches: int | None
    version: int
    published: int | None
    next_batch: int
    waits: str
    missing: tuple[str, ...]
    in_flight: int
    ready: int
    slots: int
    free_slots: int
    services: tuple[Seen, ...]

    @property
    def controller(self) -> Seen:
        return self.services[0]

    def write(self, path: Path) -> None:
        """Replaces the file at `path`; a reader finds the one before or this one, whole. Raises OSError."""
        aside = path.with_name(f".{path.name}")
        # Not `asdict`, which copies all the way down: ten times as long with a thousand services.
        services = [_plain(seen) for seen in self.services]
        aside.write_text(json.dumps({"schema": SCHEMA, **_plain(self), "services": services}))
        aside.rename(path)

    @classmethod
    def read(cls, path: Path) -> "Snapshot | None":
        """What the controller wrote last; None where it has not written yet. Raises SnapshotError for anything else."""
        try:
            data = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise SnapshotError(f"{path} cannot be read: {error}") from None
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise SnapshotError(f"{path} is no status of schema {SCHEMA}")
        try:
            services = tuple(Seen(**_only(Seen, one)) for one in data.pop("services"))
            snapshot = cls(**_only(cls, data), services=services)
        except (KeyError, TypeError) as error:
            raise SnapshotError(f"{path} is no whole status: {error}") from None
        if not services:
            raise SnapshotError(f"{path} names no service, not even the controller")
        return snapshot


def _plain(one: Any) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__slots__}


def _only(kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Raises TypeError where `data` is no object with values of the kinds that the fields of `kind` have."""
    known = {field.name: field.type for field in fields(kind)}
    for name, value in data.items():
        if name not in known or not _fits(value, str(known[name])):
            raise TypeError(f"{name} = {value!r}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


def _fits(value: Any, kind: str) -> bool:
    if isinstance(value, list):
        return kind.startswith("tuple")
    if value is None:
        return "None" in kind
    if isinstance(value, bool):
        return "bool" in kind
    if isinstance(value, int | float):
        return "float" in kind or ("int" in kind and isinstance(value, int))
    return "str" in kind and not kind.startswith("tuple") and isinstance(value, str)
