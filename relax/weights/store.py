"""The node's store: at most two versions of the weights, in shared memory, content-addressed.

The trainer (or the node's agent) writes into the place of the older version while engines read the newer one, so both
sides run at once and memory stays at twice the weights. Files are written with pwrite and read through mmap: pages are
allocated once and reused, a full file system is an error and never a SIGBUS, and no process holds a second copy.
"""

import fcntl
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relax.weights.errors import DigestMismatch, NotStored, StoreBusy, Superseded, WeightError
from relax.weights.manifest import (
    ALIGNMENT,
    ITEM_SIZES,
    MAX_CHUNK,
    Chunk,
    Manifest,
    Shapes,
    TensorEntry,
    WeightTag,
    check_names,
    chunk_digest,
    set_digest,
)
from relax.weights.slot import Slot, no_room, reserve, try_lock

if TYPE_CHECKING:
    import torch

VERSIONS_KEPT = 2
POLL_S = 0.005  # flock has no timed wait


class ChunkStore:
    """At most two versions of the weights in `directory`, shared by all processes of a run on one node.

    Any process may open it; one writes at a time. `directory` must be on tmpfs for the speed stated in the docs, but
    nothing depends on it. Methods block for at most their `wait` (seconds) and may be called from any thread.
    """

    def __init__(self, directory: Path | str, *, create: bool = False) -> None:
        self.directory = Path(directory)
        if create:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not self.directory.is_dir():
            raise NotStored(
                f"there is no weight store at {self.directory}: nobody has created it, or the run has ended"
            )
        self._slots = [Slot(self.directory, n) for n in range(VERSIONS_KEPT)]

    # ---- reading ----

    def manifests(self) -> list[Manifest]:
        """What is stored, newest first."""
        held = [m for slot in self._slots if (m := slot.manifest()) is not None]
        return sorted(held, key=lambda m: (*m.tag.order, m.tag.created_at), reverse=True)

    def newest(self) -> Manifest | None:
        return next(iter(self.manifests()), None)

    def holds(self, manifest: Manifest) -> bool:
        """Whether the bytes of this set are here, under whatever tag."""
        return any(m.tag.digest == manifest.tag.digest for m in self.manifests())

    @contextmanager
    def open(
        self, manifest: Manifest, *, expected: Shapes | None = None, verify: bool = True
    ) -> Iterator["WeightLease"]:
        """A reader's lease on one set; its bytes stay as they are until the block ends.

        `expected` (name -> shape) is what the reader's model has: a set with other names or shapes is refused whole
        (`NameMismatch`). All digests are checked first unless `verify` is false (0.034 s per GB; `DigestMismatch`).
        Raises `NotStored` when the set is not here, `Superseded` when only newer ones are.
        """
        if expected is not None:
            check_names({t.name: t.shape for t in manifest.tensors}, expected, str(manifest.tag))
        for slot in self._slots:
            with slot.shared() as fd:
                held = slot.manifest() if fd is not None else None
                if fd is None or held is None or held.tag.digest != manifest.tag.digest:
                    continue
                lease = WeightLease(held, _map(fd, held, slot.path), self.directory)
                if verify:
                    lease.verify()
                yield lease
                lease.close()
                return
        raise self._absent(manifest)

    def read_chunk(self, digest: str) -> bytes | None:
        """The bytes of one chunk, for a peer that fetches it; None when no stored version has it."""
        for slot in self._slots:
            with slot.shared() as fd:
                if fd is None or slot.manifest() is None:
                    continue
                if (chunk := slot.chunk(digest)) is not None:
                    return os.pread(fd, chunk.size, chunk.offset)
        return None

    # ---- writing ----

    def publish(
        self,
        tensors: Iterable[tuple[str, Any]],
        *,
        run_id: str,
        lineage: int,
        version: int,
        step: int,
        expected: Shapes | None = None,
        wait: float = 60.0,
    ) -> Manifest:
        """Store a new version and return its manifest.

        `tensors` yields (Hugging Face name, torch tensor or numpy array); each is written before the next is asked for,
        so a generator that gathers one tensor at a time needs memory for one. Names and shapes must be those of
        `expected`, or else of the version stored before (`NameMismatch`). Raises `NoRoom`, and `StoreBusy` naming the
        readers that held the older version for longer than `wait` seconds. After any error the place is empty and the
        newer version untouched.
        """
        before = self.newest()
        if expected is None and before is not None:
            expected = {t.name: t.shape for t in before.tensors}
        with self.writer((lineage, version), wait=wait) as image:
            if before is not None:
                image.reserve(before.image_bytes)
            entries: list[TensorEntry] = []
            end = 0
            for name, tensor in tensors:
                entry = _write_tensor(image, name, tensor, -(-end // ALIGNMENT) * ALIGNMENT)
                entries.append(entry)
                end = max(end, entry.offset + entry.size)
            total = sum(e.size for e in entries)
            tag = WeightTag(run_id, lineage, version, step, set_digest(entries), total, time.time())
            manifest = Manifest(tag, tuple(entries))
            manifest.check("the trainer")
            if expected is not None:
                check_names({e.name: e.shape for e in entries}, expected, str(tag))
            image.finish(manifest)
        return manifest

    def retag(self, *, lineage: int, version: int, step: int, wait: float = 60.0) -> Manifest:
        """Publish the newest set again under a new version: the weights did not change, no byte is written."""
        with self._writer_lock(wait):
            old = self.newest()
            if old is None:
                raise NotStored(f"version {version} cannot repeat the weights before it: {self.directory} is empty")
            tag = WeightTag(old.tag.run_id, lineage, version, step, old.tag.digest, old.tag.bytes, time.time())
            manifest = Manifest(tag, old.tensors)
            slot = next(s for s in self._slots if (m := s.manifest()) is not None and m.tag == old.tag)
            slot.fill(manifest)
            return manifest

    @contextmanager
    def writer(self, order: tuple[int, int], *, wait: float) -> Iterator["ImageWriter"]:
        """The writer's lease on the place that (lineage, version) `order` goes to: an empty one, else the older.

        Raises `Superseded` when both places hold later versions, `StoreBusy` after `wait` seconds.
        """
        deadline = time.monotonic() + wait
        with self._writer_lock(wait):
            slot = self._place(order)
            while True:
                with slot.exclusive() as fd:
                    if fd is not None:
                        image = ImageWriter(fd, slot)
                        slot.empty()
                        yield image
                        if (
                            image.finished
                            and (other := next(s for s in self._slots if s is not slot)).manifest() is None
                        ):
                            self._reserve(other, image.finished.image_bytes)
                        return
                if time.monotonic() > deadline:
                    held = slot.manifest()
                    raise StoreBusy(
                        f"{held.tag if held else slot.path} is still being read by process(es) {slot.holders() or '?'} "
                        f"after {wait:.0f} s; version {order[1]} needs its place. Restart these readers at the newest"
                    )
                time.sleep(POLL_S)

    def remove(self) -> None:
        """Give the memory back; leases that are still open stay valid until they end."""
        shutil.rmtree(self.directory, ignore_errors=True)

    # ---- within ----

    def _place(self, order: tuple[int, int]) -> Slot:
        held = [(slot, slot.manifest()) for slot in self._slots]
        for slot, manifest in held:
            if manifest is None:
                return slot
        slot, oldest = min(
            ((s, m) for s, m in held if m is not None), key=lambda p: (*p[1].tag.order, p[1].tag.created_at)
        )
        if oldest.tag.order > order:
            raise Superseded(
                f"version {order[1]} has no place in {self.directory} any more: newer ones are stored there"
            )
        return slot

    def _absent(self, manifest: Manifest) -> NotStored:
        held = self.manifests()
        kind = Superseded if held and min(m.tag.order for m in held) > manifest.tag.order else NotStored
        names = ", ".join(str(m.tag) for m in held) or "nothing"
        return kind(f"{manifest.tag} is not in {self.directory}, which holds {names}")

    @staticmethod
    def _reserve(slot: Slot, size: int) -> None:
        with slot.exclusive() as fd:
            if fd is not None:
                reserve(fd, size, slot.path)

    @contextmanager
    def _writer_lock(self, wait: float) -> Iterator[None]:
        deadline = time.monotonic() + wait
        fd = os.open(self.directory / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not try_lock(fd, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise StoreBusy(f"another process has been writing weights to {self.directory} for {wait:.0f} s")
                time.sleep(POLL_S)
            yield
        finally:
            os.close(fd)


class WeightLease:
    """One set, locked for reading. Tensors are views of shared memory: copy what must outlive the lease."""

    def __init__(self, manifest: Manifest, image: mmap.mmap | bytearray, directory: Path) -> None:
        self.manifest = manifest
        self._image = image
        self._directory = directory
        self._entries = {t.name: t for t in manifest.tensors}

    def tensor(self, name: str) -> "torch.Tensor":
        """The tensor without a copy. Writing to it changes only this process's view."""
        import torch

        entry = self._entries[name]
        dtype = getattr(torch, entry.dtype)
        if entry.size == 0:
            return torch.empty(entry.shape, dtype=dtype)
        raw = np.frombuffer(self._image, np.uint8, entry.size, entry.offset)
        return torch.from_numpy(raw).view(dtype).view(entry.shape)

    def items(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        """(name, tensor) in the order of publication."""
        return ((name, self.tensor(name)) for name in self._entries)

    def verify(self) -> None:
        """Hash every chunk. Raises `DigestMismatch` naming tensor and chunk."""
        with memoryview(self._image) as image:
            for tensor in self.manifest.tensors:
                for number, chunk in enumerate(tensor.chunks):
                    with image[chunk.offset : chunk.offset + chunk.size] as part:
                        check_chunk(
                            part, chunk, f"{self.manifest.tag}: {tensor.name}, chunk {number} in {self._directory}"
                        )

    def close(self) -> None:
        """Unmap. Raises `WeightError` when a view is still alive: after the lease its bytes would change silently."""
        if isinstance(self._image, mmap.mmap):
            try:
                self._image.close()
            except BufferError:
                raise WeightError(
                    f"{self.manifest.tag}: tensors read under a lease are still in use after it; copy them first"
                ) from None


class ImageWriter:
    """Writes one version's image into a place held by `ChunkStore.writer`."""

    def __init__(self, fd: int, slot: Slot) -> None:
        self._fd = fd
        self._slot = slot
        self.finished: Manifest | None = None

    def reserve(self, size: int) -> None:
        reserve(self._fd, size, self._slot.path)

    def detached_reserve(self, size: int) -> Callable[[], None]:
        """`reserve` as a call for another thread, which may outlive the lease without touching a file of others."""
        fd = os.dup(self._fd)

        def run() -> None:
            try:
                reserve(fd, size, self._slot.path)
            finally:
                os.close(fd)

        return run

    def write(self, offset: int, data: memoryview | bytes) -> None:
        view = memoryview(data)
        done = 0
        while done < len(view):
            try:
                done += os.pwrite(self._fd, view[done:], offset + done)
            except OSError as error:
                raise no_room(self._slot.path, offset + len(view)) from error

    def finish(self, manifest: Manifest) -> None:
        """Everything is written: make the version visible to readers."""
        self._slot.fill(manifest)
        self.finished = manifest


def check_chunk(data: bytes | memoryview, chunk: Chunk, where: str) -> None:
    """Raises `DigestMismatch` unless `data` is what the manifest states."""
    if len(data) != chunk.size:
        raise DigestMismatch(f"{where} has {len(data)} bytes instead of {chunk.size}")
    if (digest := chunk_digest(data)) != chunk.digest:
        raise DigestMismatch(
            f"{where} hashes to {digest} instead of {chunk.digest}: its bytes were changed or cut short"
        )


def _write_tensor(image: ImageWriter, name: str, tensor: Any, offset: int) -> TensorEntry:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_SIZES:
        raise WeightError(
            f"tensor {name!r} has dtype {dtype}, which weights cannot have; known: {', '.join(ITEM_SIZES)}"
        )
    data = _bytes_of(tensor)
    chunks = []
    for start in range(0, len(data), MAX_CHUNK):
        part = data[start : start + MAX_CHUNK]
        image.write(offset + start, part)
        chunks.append(Chunk(chunk_digest(part), offset + start, len(part)))
    return TensorEntry(name, dtype, tuple(int(n) for n in tensor.shape), tuple(chunks))


def _bytes_of(tensor: Any) -> memoryview:
    """Raw bytes of a numpy array, or of a torch tensor on any device."""
    if not isinstance(tensor, np.ndarray):
        import torch

        tensor = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


def _map(fd: int, manifest: Manifest, path: Path) -> mmap.mmap | bytearray:
    size = manifest.image_bytes
    if size == 0:
        return bytearray()
    if os.fstat(fd).st_size < size:
        raise DigestMismatch(f"{path} has {os.fstat(fd).st_size} bytes, {manifest.tag} needs {size}")
    # A private mapping: torch wants writable memory, and a stray write must not reach the other readers.
    return mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
