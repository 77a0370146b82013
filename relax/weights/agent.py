"""The node's weight agent: whoever locks the node's store first fetches what it lacks, the others wait for it.

Nothing is fetched on the trainer's own node, where publication has already filled the store, nor any chunk that the
older version here has too.
"""

import asyncio
import fcntl
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from relax.weights.errors import NotStored, StoreBusy
from relax.weights.manifest import Chunk, Manifest, Shapes, check_names
from relax.weights.slot import try_lock
from relax.weights.store import ChunkStore, ImageWriter, check_chunk

Fetch = Callable[[int, str], Awaitable[Any]]
"""(version, digest) -> the chunk's bytes (any contiguous buffer), or None when the source does not hold it.
Brings its own deadline."""

IN_FLIGHT = 4
"""Chunks asked for at once: hides the round trip, and bounds memory to 64 MiB."""

POLL_S = 0.01


class WeightAgent:
    """Brings sets of weights to this node's `store` (or the directory of one, made when it is not there).

    `fetch` asks the trainer or a node that already has the set (`source` names it in errors). Any number of agents may
    share a store; a lock file lets one of them work and passes to another when its holder dies.
    """

    def __init__(self, store: ChunkStore | Path, fetch: Fetch | None = None, source: str = "the trainer") -> None:
        self.store = store if isinstance(store, ChunkStore) else ChunkStore(store, create=True)
        self._fetch = fetch
        self._source = source
        self.fetched_chunks = 0
        self.fetched_bytes = 0

    async def ensure(self, manifest: Manifest, *, expected: Shapes | None = None, deadline: float) -> None:
        """Return when the store holds the set; at most `deadline` seconds from now.

        Raises `NameMismatch` before anything is fetched, `DigestMismatch` for a bad chunk, `NotStored` when the source
        does not have it, `Superseded` when the store has moved past it, `StoreBusy` at the deadline.
        """
        if expected is not None:
            check_names({t.name: t.shape for t in manifest.tensors}, expected, str(manifest.tag))
        if self.store.holds(manifest):
            return
        end = time.monotonic() + deadline
        fd = os.open(self.store.directory / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not self.store.holds(manifest):
                if try_lock(fd, fcntl.LOCK_EX):
                    if not self.store.holds(manifest):
                        await self._bring(manifest, end)
                    return
                if time.monotonic() > end:
                    raise StoreBusy(
                        f"{manifest.tag}: another process of this node has not fetched it in {deadline:.0f} s"
                    )
                await asyncio.sleep(POLL_S)
        finally:
            os.close(fd)

    async def _bring(self, manifest: Manifest, end: float) -> None:
        while True:
            try:
                with self.store.writer(manifest.tag.order, wait=0) as image:
                    await asyncio.to_thread(image.detached_reserve(manifest.image_bytes))
                    async with asyncio.timeout(end - time.monotonic()):
                        await self._fill(manifest, image)
                    image.finish(manifest)
                return
            except StoreBusy:
                if time.monotonic() > end:
                    raise
            except TimeoutError:
                raise StoreBusy(
                    f"{manifest.tag}: {self._source} did not send every chunk before the deadline"
                ) from None
            await asyncio.sleep(POLL_S)

    async def _fill(self, manifest: Manifest, image: ImageWriter) -> None:
        free = asyncio.Semaphore(IN_FLIGHT)

        async def bring(name: str, number: int, chunk: Chunk) -> None:
            async with free:
                data: bytes | memoryview | None = await asyncio.to_thread(self.store.read_chunk, chunk.digest)
                if data is None:
                    what = f"{manifest.tag}: {name}, chunk {number}"
                    data = await self._ask(manifest.tag.version, chunk, what)
                # Written in the loop: a thread could outlive a cancelled fetch and write to a place given to others.
                image.write(chunk.offset, data)

        try:
            async with asyncio.TaskGroup() as group:
                for tensor in manifest.tensors:
                    for number, chunk in enumerate(tensor.chunks):
                        group.create_task(bring(tensor.name, number, chunk))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _ask(self, version: int, chunk: Chunk, what: str) -> memoryview:
        if self._fetch is None:
            raise NotStored(f"{what} is not on this node and there is no source to fetch it from")
        answer = await self._fetch(version, chunk.digest)
        if answer is None:
            raise NotStored(f"{what} ({chunk.digest}): {self._source} does not hold it any more")
        data = memoryview(answer).cast("B")
        check_chunk(data, chunk, f"{what} from {self._source}")
        self.fetched_chunks += 1
        self.fetched_bytes += chunk.size
        return data
