"""The places of a run outside its directory, and the lock by which the living tell them from remains.

Little is imported: the guard imports this and must start at once.
"""

import fcntl
import os
import shutil
from pathlib import Path

from relax.names import file_name

SHM_ROOT = Path("/dev/shm")
# "ipc://<runtime_dir>/<service>-<incarnation>.sock" must stay within 107 bytes.
LONGEST_RUNTIME_DIR = 60


def places_of(run_id: str) -> tuple[Path, Path]:
    """Where a run's sockets (a short path) and its shared memory are on this host, whoever asks."""
    folder = file_name(f"relax-{run_id}", "the run id in")
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    usable = base and len(base) < LONGEST_RUNTIME_DIR - 24 and os.access(base, os.W_OK | os.X_OK)
    return Path(base if usable else "/tmp") / folder, SHM_ROOT / folder


def enter(runtime_dir: Path, shm_dir: Path) -> int:
    """Makes both places (mode 0700) where they are missing and takes part in the run on this host.

    The returned file descriptor holds a shared lock on `runtime_dir` until it is closed or its process dies. Raises
    PermissionError when a place belongs to somebody else.
    """
    while True:
        for place in (runtime_dir, shm_dir):
            place.mkdir(mode=0o700, exist_ok=True)
            if place.stat().st_uid != os.getuid():
                raise PermissionError(f"{place} belongs to another user")
        try:
            fd = os.open(runtime_dir, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # the last one went out between the two lines
            continue
        fcntl.flock(fd, fcntl.LOCK_SH)
        if _is(fd, runtime_dir):
            shm_dir.mkdir(mode=0o700, exist_ok=True)
            return fd
        os.close(fd)


def members(runtime_dir: Path) -> list[int]:
    """The processes of this host that take part in the run (0: one that is not seen from here). Looked up and not
    tried, for a lock that is tried may be in the way of one who means it."""
    try:
        inode = runtime_dir.stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return []
    # "1: FLOCK  ADVISORY  READ 4711 00:2b:17 0 EOF"; one that waits has "->" behind its number.
    held = (line.split() for line in locks.splitlines() if "->" not in line)
    return sorted({max(0, int(of[4])) for of in held if of[1] == "FLOCK" and of[5].endswith(f":{inode}")})


def _is(fd: int, directory: Path) -> bool:
    """Whether `directory` is still the one that was opened as `fd`."""
    try:
        return os.fstat(fd).st_ino == directory.stat().st_ino
    except FileNotFoundError:
        return False


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
