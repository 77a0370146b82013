"""What every rank of the critic does, in step: give values of responses, train on a batch."""

from typing import Any

import numpy as np
from torch import Tensor

from relax.algorithms.objective import Denominators, value_objective
from relax.config.options import Options
from relax.megatron.critic import Critic
from relax.megatron.network import LossFunction
from relax.protocol.tensors import Arrays
from relax.services.learner_work import LearnerWork
from relax.services.ranks import command


class CriticWork(LearnerWork):
    """The value model and what is done with it.

    The arrays that it trains on, cut as the actor cuts them, must hold `values`, those that the advantages were made
    from, and `returns`.
    """

    prefix = "value_"

    def __init__(self, options: Options, total_steps: int | None) -> None:
        """`total_steps`: optimizer steps of the run, None when unknown."""
        self.critic = Critic(options, options.hf_checkpoint, total_steps)
        super().__init__(options, self.critic)

    @command
    def values(self, batch: Arrays) -> np.ndarray:
        """float32 [response tokens]; the batch needs tokens and lengths alone (see relax.megatron.batches).

        values[t] is the value of the state from which response token t is predicted.
        """
        return self.critic.values(batch)

    def loss_of(self, denominators: Denominators) -> LossFunction:
        def loss(values: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, Any]:
            result = value_objective(self.options, values, fields, denominators)
            return result.loss, result.metrics

        return loss
