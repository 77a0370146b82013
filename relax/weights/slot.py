"""One place of a node's store: a preallocated tmpfs file, the manifest of what it holds, and its lock.

Locks are flock leases on the file itself, shared by readers and exclusive to the writer, so the death of a holder frees
them. The manifest is removed before the first byte of a new version is written and put back after the last: a writer
that dies in between leaves an empty place, never a torn one.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from relax.weights.errors import NoRoom
from relax.weights.manifest import Chunk, Manifest


class Slot:
    def __init__(self, directory: Path, number: int) -> None:
        self.path = directory / f"{number}.weights"
        self._sidecar = directory / f"{number}.json"
        # Parsing a large manifest costs milliseconds and every chunk served asks for it. A new one is a new file.
        self._cached: tuple[tuple[int, int], Manifest, dict[str, Chunk]] | None = None

    def manifest(self) -> Manifest | None:
        """What the place holds, complete and readable, or None."""
        try:
            stat = self._sidecar.stat()
            key = (stat.st_ino, stat.st_mtime_ns)
            if self._cached is None or self._cached[0] != key:
                manifest = Manifest.load(self._sidecar)
                self._cached = (key, manifest, {chunk.digest: chunk for chunk in manifest.chunks()})
        except FileNotFoundError:
            return None
        return self._cached[1]

    def chunk(self, digest: str) -> Chunk | None:
        """Where the place holds a chunk. Call with a lease, after `manifest`."""
        return self._cached[2].get(digest) if self._cached else None

    @contextmanager
    def shared(self) -> Iterator[int | None]:
        """File descriptor with a reader's lease, or None while a writer is at work or the file does not exist."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        try:
            yield fd if try_lock(fd, fcntl.LOCK_SH) else None
        finally:
            os.close(fd)

    @contextmanager
    def exclusive(self) -> Iterator[int | None]:
        """File descriptor with the writer's lease, or None while somebody reads."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield fd if try_lock(fd, fcntl.LOCK_EX) else None
        finally:
            os.close(fd)

    def empty(self) -> None:
        """Call with the writer's lease, before the first write."""
        self._sidecar.unlink(missing_ok=True)

    def fill(self, manifest: Manifest) -> None:
        """Call with the writer's lease, after the last write."""
        manifest.save(self._sidecar)

    def holders(self) -> list[int]:
        """Process ids with a lease on the file, from /proc/locks; empty where the kernel does not tell."""
        locks = Path("/proc/locks")
        if not locks.exists() or not self.path.exists():
            return []
        inode = str(self.path.stat().st_ino)
        fields = (line.split() for line in locks.read_text().splitlines())
        return sorted({int(f[4]) for f in fields if len(f) > 5 and f[5].rpartition(":")[2] == inode})


def reserve(fd: int, size: int, path: Path) -> None:
    """Make sure that `size` bytes of the file have memory behind them. Raises `NoRoom`.

    Without this, a full tmpfs shows only as SIGBUS or ENOSPC in the middle of a later version.
    """
    have = os.fstat(fd)
    if have.st_size >= size and have.st_blocks * 512 >= size:
        return
    stats = os.statvfs(path.parent)
    # Asked first: where fallocate fails half way, some file systems keep the half and are full for everybody else.
    if size - have.st_blocks * 512 > stats.f_bavail * stats.f_frsize:
        raise no_room(path, size)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.ftruncate(fd, have.st_size)
        raise no_room(path, size) from error


def no_room(path: Path, size: int) -> NoRoom:
    stats = os.statvfs(path.parent)
    return NoRoom(
        f"no room for weights in {path.parent}: one version needs {size / 2**20:.1f} MiB, two are kept, "
        f"{stats.f_bavail * stats.f_frsize / 2**20:.1f} MiB are free. Enlarge the file system "
        f"(mount -o remount,size=... /dev/shm; docker run --shm-size=...) or remove what old runs left there"
    )


def try_lock(fd: int, kind: int) -> bool:
    """Take an flock lease (`fcntl.LOCK_SH` or `LOCK_EX`) if it is free now."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
