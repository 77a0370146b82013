"""The copies of a model that lives on several ranks."""

from pathlib import Path
from typing import Generic, TypeVar

import structlog

from relax.megatron.snapshot import Loaded, SaveError
from relax.services.ranks import Ranks
from relax.services.saved_work import SavedWork
from relax.services.service import Context

log = structlog.get_logger()

W = TypeVar("W", bound=SavedWork)


class ModelCopies(Generic[W]):
    """See `relax.services.keeping.Copies`."""

    def __init__(self, ranks: Ranks[W], work: W) -> None:
        self._ranks, self._work = ranks, work

    async def take(self, batch: int) -> None:
        await self._ranks.run(self._work.take_snapshot, batch, batch)

    async def write(self, part: Path) -> str:
        try:
            await self._ranks.run(self._work.save, str(part))
        except SaveError as error:
            return str(error)
        return ""

    async def drop(self) -> None:
        await self._ranks.run(self._work.drop_snapshot)


async def load_part(ranks: Ranks[W], work: W, part: Path, context: Context) -> Loaded:
    """Takes over a part of the checkpoint that this life begins with, except for what the user does without; a new run
    counts its steps anew. Raises CheckpointError."""
    o, goes_on = context.options, context.cut > 0
    loaded = await ranks.run(work.load, str(part), not o.no_load_optim, not o.no_load_rng, goes_on)
    log.info("checkpoint_loaded", path=str(part), steps=loaded.steps, optimizer=loaded.optimizer, rng=loaded.generators)
    return loaded
