"""Whether a directory can be made and written to, found out before anything is started."""

import os
import tempfile
from pathlib import Path


def obstacle(path: Path) -> str | None:
    """Why no files can be made in the directory `path`, which need not exist; None when they can.

    Tries it in the nearest directory there is, and removes what it made: permissions do not tell of read-only disks,
    nor of file systems like /proc.
    """
    if "\0" in str(path):
        return "holds a NUL character"
    path = path.absolute()
    try:
        nearest = next(folder for folder in (path, *path.parents) if folder.exists())
        if not nearest.is_dir():
            return "is no directory" if nearest == path else f"cannot be made: {nearest} is no directory"
        longest = os.pathconf(nearest, "PC_NAME_MAX")
        if any(len(os.fsencode(part)) > longest for part in path.relative_to(nearest).parts):
            return f"cannot be made: a name in it has more than {longest} bytes"
        Path(tempfile.mkdtemp(prefix=".relax-", dir=nearest)).rmdir()
    except OSError as error:
        return f"cannot be made or written to: {error.strerror}"
    return None
