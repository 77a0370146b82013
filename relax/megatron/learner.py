"""A network that learns, as policy and critic do: its optimizer, its count of steps, the one way to take a step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from relax.megatron import batches
from relax.megatron.batches import Batch
from relax.megatron.network import LossFunction, Network, Sums
from relax.megatron.optimizer import Optimizer, Schedule

N = TypeVar("N", bound=Network)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One optimizer step. `loss` is the whole batch's; `metrics` the sums of what the loss function reported;
    `grad_norm` is before clipping; `lr` the rate used; `step` its index. `skipped`: no token counted, nothing changed.
    """

    loss: float
    metrics: Sums
    grad_norm: float
    lr: float
    step: int
    skipped: bool


class Learner(Generic[N]):
    """A network and its optimizer over all ranks. Every method is collective: all ranks call it with the same
    arguments."""

    def __init__(self, network: N, options: Any, schedule: Schedule) -> None:
        self.network = network
        self.optimizer = Optimizer(network.module, options, schedule)
        self.steps = 0
        self.skipped_steps = 0

    def train(self, part: Batch, loss_fn: LossFunction) -> StepResult:
        """One optimizer step over `part`, which must have a loss_mask.

        `loss_fn` is called for each micro-batch, on the last pipeline stage, with the network's outputs [B, T] (see
        the class of the learner) and the micro-batch's fields (see `batches.Micro.fields`). It returns its share of the
        loss, already divided by counts of the whole of `part`, and metrics as (sum, count). A part without a loss token
        has loss 0 and skips the step; the schedule goes on, as the step was planned. Raises BatchError, and
        NonFiniteGradientError with the weights unchanged.
        """
        batches.check(part)
        if "loss_mask" not in part:
            raise batches.BatchError("the batch lacks loss_mask, which says what tokens to train on")
        step = self.steps
        self.steps += 1
        if batches.num_loss_tokens(part) == 0:
            self.skipped_steps += 1
            return StepResult(0.0, {}, 0.0, self.optimizer.schedule.at(step), step, skipped=True)
        self.optimizer.zero_grad()
        loss, metrics = self.network.backward(part, loss_fn)
        norm, rate = self.optimizer.step(step)
        return StepResult(loss, metrics, norm, rate, step, skipped=False)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor in the training dtype), one after another, on every rank.

        A tied lm_head does not appear. Every rank must exhaust the iterator.
        """
        return self.network.state()
