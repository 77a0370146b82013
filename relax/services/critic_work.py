"""What every rank of the critic does, in step: give values of responses, train on a batch."""

from typing import Any

import numpy as np
from torch import Tensor

from relax.algorithms.objective import Denominators, value_objective
from relax.config.options import Options
from relax.megatron import batches
from relax.megatron.critic import Critic
from relax.metrics import Metric, Metrics
from relax.protocol.tensors import Arrays
from relax.services.ranks import command
from relax.services.saved_work import SavedWork


class CriticWork(SavedWork):
    """The value model and what is done with it."""

    def __init__(self, options: Options, total_steps: int | None) -> None:
        """`total_steps`: optimizer steps of the run, None when unknown."""
        self.options = options
        self.critic = Critic(options, options.hf_checkpoint, total_steps)
        self.saves(self.critic.network, self.critic)

    @command
    def values(self, batch: Arrays) -> np.ndarray:
        """float32 [response tokens]; the batch needs tokens and lengths alone (see relax.megatron.batches).

        values[t] is the value of the state from which response token t is predicted.
        """
        return self.critic.values(batch)

    @command
    def train(self, batch: Arrays) -> dict[str, Metric]:
        """All optimizer steps of one rollout batch, cut as the actor cuts it, and what they measured.

        The arrays must hold `values`, those that the advantages were made from, and `returns`.
        """
        metrics = Metrics()
        for part in batches.steps(batch, self.options.num_steps_per_rollout):
            self._step(part, metrics)
        return metrics.wire()

    def _step(self, part: Arrays, metrics: Metrics) -> None:
        denominators = Denominators.of(part["loss_mask"], part["rewards"])

        def loss(values: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, Any]:
            result = value_objective(self.options, values, fields, denominators)
            return result.loss, result.metrics

        step = self.critic.train(part, loss)
        for name, (total, count) in step.metrics.items():
            metrics.mean(name, total, count)
        # Into the same row as the actor's, which has these names without the prefix.
        metrics.mean("train/value_grad_norm", step.grad_norm, 1)
        metrics.last("train/value_lr", step.lr)
        metrics.last("train/value_step", step.step + 1)
        metrics.sum("train/value_skipped_steps", step.skipped)
