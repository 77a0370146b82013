"""A part of a checkpoint: a directory that one service wrote, with the size and digest of each of its files.

parts.json, written last: `{"<file>": {"size": <bytes>, "xxh3_128": "<32 hex digits>"}, ...}`, file names relative to
the part with `/` between folders.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from relax.checkpoints.durable import write_text
from relax.checkpoints.errors import CheckpointError

PARTS = "parts.json"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """`size` in bytes, of all files that `listing` lists; `digest` is the xxh3_128 of parts.json itself."""

    files: int
    size: int
    digest: str


def file_digest(path: Path) -> str:
    """xxh3_128 of a file's content, 32 hex digits."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()


def write_parts(part: Path) -> None:
    """Lists all files of `part`, which are complete, in its parts.json."""
    files = sorted(path for path in part.rglob("*") if path.is_file() and path != part / PARTS)
    listing = {
        path.relative_to(part).as_posix(): {"size": path.stat().st_size, "xxh3_128": file_digest(path)}
        for path in files
    }
    write_text(part / PARTS, json.dumps(listing, indent=1) + "\n")


def verify(part: Path) -> Part:
    """Reads every file of `part` and compares it with parts.json. Raises CheckpointError for the first that differs,
    is missing, or is not listed."""
    listing = _listing(part)
    size = 0
    for name, fact in listing.items():
        path = part / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; {part / PARTS} lists it with {fact['size']} bytes")
        found = path.stat().st_size
        if found != fact["size"]:
            raise CheckpointError(f"{path} has {found} bytes, it was written with {fact['size']}")
        if (digest := file_digest(path)) != fact["xxh3_128"]:
            raise CheckpointError(f"{path} has digest {digest}, it was written with {fact['xxh3_128']}")
        size += found
    here = {path.relative_to(part).as_posix() for path in part.rglob("*") if path.is_file()} - {PARTS}
    if strangers := sorted(here - listing.keys()):
        raise CheckpointError(f"{part / strangers[0]} is not listed in {part / PARTS}: the part was not closed")
    return Part(len(listing), size, file_digest(part / PARTS))


def _listing(part: Path) -> dict[str, dict[str, Any]]:
    path = part / PARTS
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the part was not finished")
    try:
        listing = json.loads(path.read_text())
        good = isinstance(listing, dict) and all(
            isinstance(fact["size"], int) and isinstance(fact["xxh3_128"], str) for fact in listing.values()
        )
    except (ValueError, TypeError, KeyError):
        good = False
    if not good or not listing:
        raise CheckpointError(f"{path} is no list of files with sizes and digests")
    if outside := [name for name in listing if name.startswith("/") or ".." in name.split("/")]:
        raise CheckpointError(f"{path} lists {outside[0]!r}, which is outside of the part")
    return listing
