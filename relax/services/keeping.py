"""How a trained model gets into checkpoints: copied between two batches, written while the next ones are trained."""

import asyncio
from pathlib import Path
from typing import Protocol

import structlog

from relax.protocol.messages import Save, Saved
from relax.services.milestone import Milestone
from relax.services.watchdog import Watchdog

log = structlog.get_logger()


class Copies(Protocol):
    """A model that is copied while nothing else touches it; the copy is written beside its work."""

    async def take(self, batch: int) -> None:
        """Copies the state at cut `batch`. The copy before is written or dropped."""

    async def write(self, part: Path) -> str:
        """Writes the copy as a part of a checkpoint; says why it could not. The copy is gone then."""

    async def drop(self) -> None:
        """Forgets the copy."""


class Keeping:
    """Holds at most one copy, of cut `_held`: taken at every multiple of `interval` (None: when it is asked for).

        trained c batches -> take(c) -> Trained(c - 1) -> ... -> Save(c) -> write

    A copy that is still being written, or may be asked for yet, when the next cut comes is not disturbed, and that cut
    is left out unless the model stands at it when it is asked for.
    """

    def __init__(
        self, copies: Copies, role: str, checkpoints: Path, interval: int | None, version: Milestone, watchdog: Watchdog
    ) -> None:
        self._copies, self._role, self._checkpoints = copies, role, checkpoints
        self._interval, self._version, self._watchdog = interval, version, watchdog
        self._held: int | None = None

    async def trained(self, cut: int) -> None:
        """The model has trained `cut` batches, and whoever is to hear of it has not yet."""
        if self._interval is None or cut % self._interval:
            return
        if self._held is not None:
            log.warning("snapshot_left_out", batch=cut, unwritten=self._held)
            return
        await self._take(cut)

    async def save(self, message: Save, busy: asyncio.Lock) -> Saved:
        """What is done when the controller asks. `busy` is held while a batch is trained."""
        cut = message.batch
        if not message.directory:
            if self._held == cut:
                await self._drop()
            return Saved(cut, "")
        if self._held != cut:
            if self._held is not None and self._held < cut:
                await self._drop()  # nobody asks for it any more: cuts rise, and one is written after the other
            async with busy:
                if self._version.value != cut:
                    return Saved(cut, f"the state after batch {cut - 1} is gone: batch {self._version.value} is next")
                await self._take(cut)
        try:
            return await write_part(self._copies, self._checkpoints, self._role, message, self._watchdog)
        finally:
            self._held = None

    async def _take(self, cut: int) -> None:
        self._held = cut
        await self._copies.take(cut)

    async def _drop(self) -> None:
        await self._copies.drop()
        self._held = None


async def write_part(copies: Copies, checkpoints: Path, role: str, message: Save, watchdog: Watchdog) -> Saved:
    """Writes what was copied into the checkpoint that the controller has begun. The copy is gone then."""
    whole = checkpoints / message.directory
    if not await asyncio.to_thread(whole.is_dir):
        await copies.drop()
        return Saved(message.batch, f"{whole} is not there: the hosts of controller and {role} must share it")
    with watchdog.work("writing a checkpoint"):
        return Saved(message.batch, await copies.write(whole / role))
