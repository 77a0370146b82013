"""The model of a service on its Megatron ranks: built, taken over from a checkpoint, copied for the next, let go."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, TypeVar

from relax.config.options import Options
from relax.megatron.snapshot import Loaded
from relax.metrics import Metrics
from relax.services.learner_work import LearnerWork
from relax.services.model_copies import ModelCopies
from relax.services.models.base import Taken
from relax.services.ranks import Ranks
from relax.services.saved_work import SavedWork
from relax.services.service import Service

COMPUTING = "computing"

P = ParamSpec("P")
W = TypeVar("W", bound=SavedWork)
L = TypeVar("L", bound=LearnerWork)


class RankedModel(Generic[W]):
    """`work` is what all ranks do, run through `ranks`."""

    copies: ModelCopies[W]

    def __init__(self, service: Service) -> None:
        self.service = service
        self.ranks: Ranks[W] = Ranks(service.role)

    async def build_work(self, work: Callable[Concatenate[Options, P], W], *args: P.args, **kwargs: P.kwargs) -> None:
        """Starts the ranks, which live until `close`; one that falls ends the service."""
        self.work = await self.ranks.build(work, self.service.context.model_options, *args, **kwargs)
        self.service.spawn(self.ranks.keep(), "keeping the ranks")
        self.service.counters["micro_batches"] = 0.0
        self.work.tell(self._moved)
        self.copies = ModelCopies(self.ranks, self.work)
        self.service.log.info("model_built", parameters=self.work.num_parameters)

    async def take_over(self, part: Path) -> Loaded:
        """Takes over a part of the checkpoint that this life begins with, except for what the user does without; a new
        run counts its steps anew. Raises CheckpointError."""
        o, goes_on = self.service.options, self.service.context.cut > 0
        loaded = await self.ranks.run(self.work.load, str(part), not o.no_load_optim, not o.no_load_rng, goes_on)
        told = {"steps": loaded.steps, "optimizer": loaded.optimizer, "rng": loaded.generators}
        self.service.log.info("checkpoint_loaded", path=str(part), **told)
        return loaded

    def computing(self) -> AbstractContextManager[None]:
        """For what consists of micro-batches, while this service waits for it."""
        return self.service.watchdog.work(COMPUTING)

    def _moved(self) -> None:
        """A sign of progress to the watchdog and, with the counters, to the controller: a batch takes what it takes.
        Called by the model's thread."""
        self.service.watchdog.moved(COMPUTING)
        self.service.counters["micro_batches"] += 1

    async def close(self, clean: bool) -> None:
        await self.ranks.close(clean)


class RankedLearner(RankedModel[L]):
    """See `TrainerModel`."""

    async def load(self, part: Path) -> int:
        return (await self.take_over(part)).steps

    async def reserve(self) -> int:
        return await self.ranks.run(self.work.reserve_snapshot)

    async def train(self, taken: Taken) -> tuple[Metrics, float]:
        started = time.monotonic()
        with self.computing():
            metrics = Metrics(await self.ranks.run(self.work.train, taken.tensors.arrays()))
        return metrics, time.monotonic() - started
