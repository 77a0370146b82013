"""The policy: a network with an optimizer, as the actor uses it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from relax.megatron import batches, parallel
from relax.megatron.batches import Batch
from relax.megatron.export import save_hf
from relax.megatron.network import LossFunction, Network, Sums
from relax.megatron.optimizer import Optimizer, Schedule


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


class Policy:
    """The policy over all ranks of the actor. Every method is collective: all ranks call it with the same arguments.

    `hf_checkpoint` is a Hugging Face directory (Llama, Qwen2, Qwen3). `total_steps` is the number of optimizer steps of
    the run, None when it is unknown. Reads from options: the parallel sizes, seed, train_dtype, micro_batch_size,
    rollout_temperature, lr*, min_lr, weight_decay, adam_*, clip_grad.
    Raises CheckpointError, GridError and ValueError, each naming what to change.
    """

    def __init__(self, options: Any, hf_checkpoint: str | Path, total_steps: int | None = None) -> None:
        if total_steps is not None and total_steps <= 0:
            raise ValueError(f"total_steps is {total_steps}; a run has at least one optimizer step")
        self.network = Network(options, hf_checkpoint, trainable=True)
        self.optimizer = Optimizer(self.network.module, options, Schedule.from_options(options, total_steps))
        self.temperature = float(options.rollout_temperature)
        self.steps = 0
        self.skipped_steps = 0

    @property
    def grid(self) -> parallel.Grid:
        return self.network.grid

    @property
    def num_parameters(self) -> int:
        return self.network.num_parameters

    def logprobs(self, batch: Batch, temperature: float | None = None) -> np.ndarray:
        """float32 [response tokens of the batch]: log-probabilities under the present weights, forward only.

        Of logits / temperature, by default the sampling temperature. Raises BatchError.
        """
        return self.network.logprobs(batch, self.temperature if temperature is None else temperature)

    def train(self, part: Batch, loss_fn: LossFunction) -> StepResult:
        """One optimizer step over `part`, which must have a loss_mask.

        `loss_fn(current [B, T], entropy [B, T], fields)` is called for each micro-batch (see `batches.Micro.fields`) on
        the last pipeline stage. It returns its share of the loss, already divided by counts of the whole of `part`, and
        metrics as (sum, count). A part without a loss token has loss 0 and skips the step; the schedule goes on, as the
        step was planned. Raises BatchError, and NonFiniteGradientError with the weights unchanged.
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
        loss, metrics = self.network.backward(part, self.temperature, loss_fn)
        norm, rate = self.optimizer.step(step)
        return StepResult(loss, metrics, norm, rate, step, skipped=False)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor in the training dtype), one after another, on every rank.

        A tied lm_head does not appear. Every rank must exhaust the iterator.
        """
        return self.network.state()

    def save_hf(self, path: str | Path) -> None:
        """Writes a Hugging Face model directory; rank 0 writes. Raises FileExistsError when `path` exists."""
        save_hf(self.network, Path(path))

    def close(self) -> None:
        """Leaves the grid of processes."""
        parallel.shutdown()
