"""The policy of the actor on its Megatron ranks: trained in one lane, its staged weights read in another."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from relax.services.actor_work import PUBLICATION, ActorWork
from relax.services.models.base import Weights
from relax.services.models.ranked import RankedLearner
from relax.services.ranks import Leader
from relax.weights.checkpoint import checkpoint_shapes
from relax.weights.manifest import Shapes

T = TypeVar("T")


class MegatronPolicy(RankedLearner[ActorWork]):
    """See `PolicyModel`."""

    shapes: Shapes | None

    async def build(self, num_batches: int | None) -> None:
        o = self.service.options
        own = None if num_batches is None else max(num_batches - o.num_critic_only_steps, 1)
        await self.build_work(ActorWork, None if own is None else own * o.num_steps_per_rollout)
        self.shapes = checkpoint_shapes(o.hf_checkpoint)

    async def stage(self, place: int) -> None:
        await self.ranks.run(self.work.stage, place)

    async def read(self, place: int | None, use: Callable[[Weights | None], T]) -> T:
        def in_lane(ranks: Leader[ActorWork]) -> T:
            return use(None if place is None else ranks.run(self.work.weights, place))

        return await self.ranks.lead(in_lane, PUBLICATION)

    async def export(self, path: Path) -> str:
        await self.ranks.run(self.work.export, str(path))
        return str(path)
