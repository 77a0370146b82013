"""Files that are on the disk when the call returns, in the order in which they were made."""

import os
import shutil
from pathlib import Path


def sync(path: Path) -> None:
    """The content of a file, or the entries of a directory, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(root: Path) -> None:
    """Everything below `root`, innermost first, and `root` itself."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))


def write_text(path: Path, text: str) -> None:
    """`path` holds `text` as a whole or is as it was before."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text)
    sync(aside)
    aside.rename(path)
    sync(path.parent)


def move(path: Path, to: Path) -> None:
    """Renames within one directory, for good."""
    path.rename(to)
    sync(to.parent)


def remove(path: Path) -> None:
    """A directory and all that is in it; whatever of it is gone already is no error."""
    shutil.rmtree(path, ignore_errors=True)
