"""The checkpoints of a run, one directory a cut: written aside, renamed when whole, marked last.

    checkpoints/40.partial-3f2a/  ledger/ actor/ critic/    being written, or what a crash left of it
    checkpoints/40/               the same, renamed
    checkpoints/40/complete.json  the marker: only now it counts
    checkpoints/20.discarded-91/  on its way out

A directory counts when its marker is there and every file of every part has the size and the digest that it was written
with. Whatever moment a process dies at, the newest checkpoint that counted before still counts, or a newer one does.
"""

import json
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from relax.checkpoints import durable
from relax.checkpoints.errors import CheckpointError, NoRoomError
from relax.checkpoints.parts import LIST, File, PartError, digest_of, read_list, verify, write_list

SCHEMA_VERSION = 1
MARKER = "complete.json"
# What a part may hold beyond the one of the checkpoint before: the ledger grows.
MARGIN = 1.1
_PARTIAL, _DISCARDED = "partial", "discarded"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Part:
    """What one service wrote: `size` in bytes of all its files, `digest` of their list."""

    files: int
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that counts. `batch` is the cut c: batches 0 to c - 1 are trained. `options` is the fingerprint of the
    options that a resume must share."""

    path: Path
    run_id: str
    lineage: int
    batch: int
    parts: Mapping[str, Part]
    options: str
    created_at: str

    def part(self, name: str) -> Path:
        """The directory of a part. Raises CheckpointError when the checkpoint has none of that name."""
        if name not in self.parts:
            has = ", ".join(sorted(self.parts))
            raise CheckpointError(f"checkpoint {self.path} has no part {name!r}; it has {has}")
        return self.path / name

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(part.size for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class Writing:
    """A checkpoint in the making: each service writes its part into `part(name)` and closes it with the list of
    its files (`relax.checkpoints.parts`)."""

    batch: int
    path: Path

    def part(self, name: str) -> Path:
        return self.path / name

    def close_part(self, name: str) -> None:
        """Lists all files of a part that this process has written, for a service without a list of its own."""
        part = self.part(name)
        files = [path for path in part.iterdir() if path.name != LIST]
        for path in files:
            durable.sync(path)
        write_list(part, {path.name: File(path.stat().st_size, digest_of(path)) for path in files})


class CheckpointDirectory:
    """The checkpoints in `path`, of which the newest `keep` are kept. One process at a time begins and completes."""

    def __init__(self, path: Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep = {keep}: at least the newest checkpoint is kept")
        self.path = path
        self._keep = keep

    # --- writing -----------------------------------------------------------------------------------------------------

    def begin(self, batch: int, *, wanted: int | None = None) -> Writing:
        """A directory aside for the checkpoint at cut `batch`; what crashed ones left is removed first.

        `wanted` is the bytes it will take; by default as many as the newest that has a marker, and some more. Raises
        NoRoomError when the disk has less, CheckpointError when a checkpoint that counts is there already or the
        directory cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._clear()
            self._there_is_room(batch, wanted)
            if (there := self.path / str(batch)).exists():
                self._set_aside(there)
            aside = self.path / f"{batch}.{_PARTIAL}-{secrets.token_hex(4)}"
            aside.mkdir()
        except OSError as error:
            raise CheckpointError(f"checkpoint {batch} cannot be begun in {self.path}: {error}") from error
        return Writing(batch, aside)

    def complete(
        self, writing: Writing, *, parts: Iterable[str], run_id: str, lineage: int, options: str = ""
    ) -> Checkpoint:
        """Every one of `parts` has been written: the checkpoint counts from now on, and the oldest ones go.

        Raises CheckpointError when a part is missing or not as its parts.json says, or the disk refuses; the checkpoint
        then does not count and the others are as they were.
        """
        try:
            verified = {name: _verified(writing.part(name)) for name in parts}
            durable.sync_tree(writing.path)
            place = self.path / str(writing.batch)
            durable.move(writing.path, place)
            made = Checkpoint(
                place,
                run_id,
                lineage,
                writing.batch,
                verified,
                options,
                datetime.now(UTC).isoformat(timespec="seconds"),
            )
            durable.write_text(place / MARKER, _text(made))
        except OSError as error:
            raise CheckpointError(f"checkpoint {writing.batch} cannot be written to {self.path}: {error}") from error
        self._prune(made)
        return made

    def abandon(self, writing: Writing) -> None:
        """The checkpoint is given up; what was written of it is removed."""
        durable.remove(writing.path)

    # --- reading -----------------------------------------------------------------------------------------------------

    def newest(self) -> Checkpoint | None:
        """The newest that counts; each newer one that does not is named in a warning. None when there is none."""
        for path in self._numbered():
            try:
                return self._read(path)
            except CheckpointError as error:
                log.warning("checkpoint_skipped", checkpoint=str(path), problem=str(error))
            except OSError as error:
                log.warning("checkpoint_skipped", checkpoint=str(path), problem=f"cannot be read: {error}")
        return None

    def marked(self) -> Iterator[Checkpoint]:
        """By their markers alone, the newest first: what they hold is not looked at."""
        for path in self._numbered():
            try:
                yield self._marker(path)
            except CheckpointError:
                continue

    def _read(self, path: Path) -> Checkpoint:
        return _whole(self._marker(path))

    def _marker(self, path: Path) -> Checkpoint:
        made = read_marker(path)
        if str(made.batch) != path.name:
            raise CheckpointError(f"{path / MARKER} is of batch {made.batch}")
        return made

    def _numbered(self) -> list[Path]:
        """Directories of checkpoints, marked or not, the newest first."""
        if not self.path.is_dir():
            return []
        return sorted(
            (path for path in self.path.iterdir() if path.name.isdecimal() and path.is_dir()),
            key=lambda path: int(path.name),
            reverse=True,
        )

    # --- room --------------------------------------------------------------------------------------------------------

    def _there_is_room(self, batch: int, wanted: int | None) -> None:
        if wanted is None:
            wanted = next((int(made.size * MARGIN) for made in self.marked()), 0)
        free = shutil.disk_usage(self.path).free
        if free < wanted:
            raise NoRoomError(
                f"checkpoint {batch} needs about {wanted} bytes in {self.path}, and {free} are free; make room there "
                "or lower --keep-checkpoints"
            )

    def _clear(self) -> None:
        """What crashed processes were writing or removing."""
        for path in self.path.iterdir():
            if re.fullmatch(rf"\d+\.({_PARTIAL}|{_DISCARDED})-[0-9a-f]+", path.name):
                durable.remove(path)

    def _set_aside(self, there: Path) -> None:
        """A directory in the way of the one to be written: unmarked or damaged, else it is not written again."""
        try:
            made = self._read(there)
        except CheckpointError as error:
            log.warning("checkpoint_replaced", checkpoint=str(there), problem=str(error))
            self._discard(there)
        else:
            raise CheckpointError(f"{made.path} is a complete checkpoint of this cut already")

    def _prune(self, newest: Checkpoint) -> None:
        """Keeps the newest complete ones up to `newest`, which was verified just now. Later numbers are what an earlier
        lineage left damaged: a resume began before them."""
        kept = [made.path for made in self.marked() if made.batch <= newest.batch][: self._keep]
        for path in self._numbered():
            if path not in kept:
                try:
                    self._discard(path)
                except OSError as error:
                    log.warning("checkpoint_not_removed", checkpoint=str(path), problem=str(error))

    def _discard(self, path: Path) -> None:
        """Out of the way in one step, so that it never counts in part; its files follow."""
        gone = path.with_name(f"{path.name}.{_DISCARDED}-{secrets.token_hex(4)}")
        durable.move(path, gone)
        durable.remove(gone)


def _verified(part: Path) -> Part:
    """Every file of a part is as it was written, and no other is there. Raises CheckpointError."""
    try:
        verify(part)
        files = read_list(part)
    except PartError as error:
        raise CheckpointError(str(error)) from None
    here = {path.relative_to(part).as_posix() for path in part.rglob("*") if path.is_file()} - {LIST}
    if strangers := sorted(here - files.keys()):
        raise CheckpointError(f"{part / strangers[0]} is not listed in {part / LIST}: the part was not closed")
    return Part(len(files), sum(file.size for file in files.values()), digest_of(part / LIST))


def read_marker(path: Path) -> Checkpoint:
    """What the marker of a checkpoint says; its parts are not looked at. Raises CheckpointError."""
    marker = path / MARKER
    if not marker.is_file():
        raise CheckpointError(f"it has no {MARKER}: its writing did not end")
    try:
        facts: dict[str, Any] = json.loads(marker.read_text())
        if facts["schema"] != SCHEMA_VERSION:
            raise CheckpointError(f"{marker} has schema {facts['schema']}, this Relax reads {SCHEMA_VERSION}")
        parts = {str(name): Part(**part) for name, part in facts["parts"].items()}
        made = Checkpoint(
            path, facts["run_id"], facts["lineage"], facts["batch"], parts, facts["options"], facts["created_at"]
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{marker} is no marker: {error!r}") from None
    return made


def read_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint that counts, wherever it is, read to its last byte. Raises CheckpointError, OSError."""
    return _whole(read_marker(path))


def _whole(made: Checkpoint) -> Checkpoint:
    """`made`, whose files are those that its marker tells of. Raises CheckpointError."""
    for name, written in made.parts.items():
        if _verified(made.path / name).digest != written.digest:
            raise CheckpointError(f"{made.path / name} lists other files than the marker says")
    return made


def _text(made: Checkpoint) -> str:
    facts = {
        "schema": SCHEMA_VERSION,
        "run_id": made.run_id,
        "lineage": made.lineage,
        "batch": made.batch,
        "parts": {name: asdict(part) for name, part in made.parts.items()},
        "options": made.options,
        "created_at": made.created_at,
    }
    return json.dumps(facts, indent=1) + "\n"
