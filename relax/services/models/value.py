"""The value model of the critic on its Megatron ranks."""

import numpy as np

from relax.protocol.tensors import Responses
from relax.services.critic_work import CriticWork
from relax.services.models.ranked import RankedLearner


class ValueModel(RankedLearner[CriticWork]):
    """See `TrainerModel`."""

    async def build(self, num_batches: int | None) -> None:
        total = None if num_batches is None else num_batches * self.service.options.num_steps_per_rollout
        await self.build_work(CriticWork, total)

    async def values(self, responses: Responses) -> np.ndarray:
        """float32, one a response token."""
        with self.computing():
            return await self.ranks.run(self.work.values, responses.arrays())
