"""What every rank of a model that learns does with a batch, in step: its optimizer steps, and what they measure."""

from typing import Any, ClassVar

from relax.algorithms.objective import Denominators
from relax.config.options import Options
from relax.megatron import batches
from relax.megatron.learner import Learner
from relax.megatron.network import LossFunction
from relax.metrics import Metric, Metrics
from relax.protocol.tensors import Arrays
from relax.services.ranks import command
from relax.services.saved_work import SavedWork


class LearnerWork(SavedWork):
    """A subclass has a `learner` and says what it minimizes: `loss_of`.

    `prefix` is what its metrics of a step have before their names, as actor and critic report into one row.
    """

    prefix: ClassVar[str] = ""

    def __init__(self, options: Options, learner: Learner[Any]) -> None:
        self.options, self.learner = options, learner
        self.saves(learner.network, learner)

    def loss_of(self, denominators: Denominators) -> LossFunction:
        """The loss function of one step; see `Learner.train`."""
        raise NotImplementedError

    def complete(self, batch: Arrays, metrics: Metrics) -> Arrays:
        """The batch with what the learner itself has to say about it before the first step."""
        return batch

    @command
    def train(self, batch: Arrays) -> dict[str, Metric]:
        """All optimizer steps of one rollout batch (arrays of TrainTensors), and what they measured."""
        metrics = Metrics()
        whole = self.complete(batch, metrics)
        for part in batches.steps(whole, self.options.num_steps_per_rollout):
            self._step(part, metrics)
        return metrics.wire()

    def _step(self, part: Arrays, metrics: Metrics) -> None:
        step = self.learner.train(part, self.loss_of(Denominators.of(part["loss_mask"], part["rewards"])))
        for name, (total, count) in step.metrics.items():
            metrics.mean(name, total, count)
        of_step = f"train/{self.prefix}"
        metrics.mean(f"{of_step}grad_norm", step.grad_norm, 1)
        metrics.last(f"{of_step}lr", step.lr)
        metrics.last(f"{of_step}step", step.step + 1)
        metrics.sum(f"{of_step}skipped_steps", step.skipped)
