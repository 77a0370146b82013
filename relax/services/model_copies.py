"""The copies of a model that lives on several ranks."""

from pathlib import Path
from typing import Generic, TypeVar

from relax.megatron.snapshot import SaveError
from relax.services.ranks import Ranks
from relax.services.saved_work import SavedWork

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
