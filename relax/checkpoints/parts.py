"""A part of a checkpoint: a directory of files and the list of them, by which a missing or damaged one is found.

`parts.json` holds file name -> [size in bytes, xxh3_128 as hex] and is written last. The digest guards against
accidents (a truncated file, a bad block), not against somebody who can write to the directory.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from errno import EINVAL, EOPNOTSUPP
from pathlib import Path
from typing import Any

import xxhash

from relax.checkpoints.durable import sync

LIST = "parts.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_CHUNK = 16 << 20


class PartError(ValueError):
    """A part that is not whole; the text names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class File:
    """What a file of a part must be."""

    size: int
    digest: str


def write_list(directory: Path, files: Mapping[str, File]) -> None:
    """Writes the list, synced; to be called when all files are. Raises OSError."""
    table = {name: [file.size, file.digest] for name, file in sorted(files.items())}
    write_new(directory / LIST, json.dumps(table, indent=1).encode())
    sync(directory)


def write_new(path: Path, *pieces: bytes | memoryview) -> File:
    """Writes a new file, synced, in one pass with its digest. Its space is taken first, so that a full disk is found
    before anything is written. Raises OSError; what was written is removed."""
    digest, size = xxhash.xxh3_128(), sum(len(piece) for piece in pieces)
    try:
        with path.open("xb") as opened:
            _reserve(opened.fileno(), size)
            for piece in pieces:
                for start in range(0, len(piece), _CHUNK):
                    chunk = piece[start : start + _CHUNK]
                    digest.update(chunk)
                    opened.write(chunk)
            opened.flush()
            os.fsync(opened.fileno())
    except FileExistsError:
        raise
    except OSError as error:
        path.unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror}; {size} bytes are wanted", str(path)) from None
    return File(size, digest.hexdigest())


def _reserve(descriptor: int, size: int) -> None:
    if not size:
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (EINVAL, EOPNOTSUPP):  # a file system that cannot: the writing itself will tell
            raise


def read_list(directory: Path) -> dict[str, File]:
    """What the part's files must be. Raises PartError when there is no list or it is none."""
    path = directory / LIST
    try:
        table = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise PartError(f"{path} is missing: the part was not written to its end") from None
    except ValueError as error:
        raise PartError(f"{path} is damaged: {error}") from None
    if not isinstance(table, dict):
        raise PartError(f"{path} is damaged: it holds no table of files")
    return {name: _file(path, name, entry) for name, entry in table.items()}


def verify(directory: Path) -> None:
    """Reads every file of the part. Raises PartError naming the first that is missing or not what was written."""
    for name, expected in read_list(directory).items():
        check_size(directory, name, expected)
        found = digest_of(directory / name)
        if found != expected.digest:
            raise PartError(f"{directory / name} is damaged: digest {found}, written was {expected.digest}")


def check_size(directory: Path, name: str, expected: File) -> None:
    """Raises PartError when the file is missing or has another size."""
    path = directory / name
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise PartError(f"{path} is missing") from None
    if size != expected.size:
        raise PartError(f"{path} has {size} bytes, {expected.size} were written")


def digest_of(path: Path) -> str:
    """xxh3_128 of a file, as hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _file(path: Path, name: str, entry: Any) -> File:
    if not _NAME.fullmatch(name):
        raise PartError(f"{path} is damaged: {name!r} is no name of a file in its directory")
    match entry:
        case [int(size), str(digest)] if size >= 0 and _DIGEST.fullmatch(digest):
            return File(size, digest)
    raise PartError(f"{path} is damaged: {name} has {entry!r}, not a size and a digest")
