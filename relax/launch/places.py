"""The places of a run outside its directory, and the lock by which the living tell them from remains.

Standard library only: the guard imports this and must start at once.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

SHM_ROOT = Path("/dev/shm")
# "ipc://<runtime_dir>/<service>-<incarnation>.sock" must stay within 107 bytes.
LONGEST_RUNTIME_DIR = 60


def make_runtime_dir() -> Path:
    """A new directory of mode 0700 for sockets, with a short path."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    usable = base and len(base) < LONGEST_RUNTIME_DIR - 16 and os.access(base, os.W_OK | os.X_OK)
    return Path(tempfile.mkdtemp(prefix="relax-", dir=base if usable else "/tmp"))


def make_shm_dir(run_id: str) -> Path:
    """A new directory of mode 0700 in shared memory."""
    place = SHM_ROOT / f"relax-{run_id}"
    place.mkdir(mode=0o700)
    return place


def lock(directory: Path) -> int:
    """A shared lock on `directory`, held by the returned file descriptor until it is closed or its process dies."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def try_lock(fd: int) -> bool:
    """Takes the lock for this descriptor alone; False when somebody else holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_if_dead(runtime_dir: Path, shm_dir: Path) -> bool:
    """Removes a run's sockets and shared memory when nobody on this host takes part in it any more."""
    try:
        fd = os.open(runtime_dir, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    try:
        if not try_lock(fd):
            return False
        shutil.rmtree(shm_dir, ignore_errors=True)
        shutil.rmtree(runtime_dir, ignore_errors=True)
        return True
    finally:
        os.close(fd)
