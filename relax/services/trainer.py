"""What every rank of the actor does, in step: train a batch, give out the weights, write the export.

Rank 0 (the actor service) leads: it names the next command and its arrays, every rank then runs the same method. The
other ranks only follow.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from relax.algorithms import registry
from relax.algorithms.objective import Denominators, objective, proximal_source
from relax.config.options import Options
from relax.launch.process import die_with_parent
from relax.megatron import batches, exchange, parallel
from relax.megatron.policy import Policy
from relax.metrics import Metric, Metrics
from relax.protocol.tensors import Arrays
from relax.services.service import Context

# How often a leader without work says so. Followers wait for a command no longer than LOST_SECONDS.
IDLE_SECONDS = 5.0
LOST_SECONDS = 300.0


class Trainer:
    """The policy and what is done with it. Every method is collective over the actor's ranks."""

    def __init__(self, options: Options, total_steps: int | None) -> None:
        """`total_steps`: optimizer steps of the run as far as rank 0 knows, whose word holds on every rank."""
        self.options = options
        self.spec = registry.get(options.advantage_estimator)
        parallel.initialize(options, timeout=LOST_SECONDS)
        told, _ = exchange.broadcast({"total_steps": total_steps})
        self.policy = Policy(options, options.hf_checkpoint, told["total_steps"])

    def train(self, batch: Arrays) -> dict[str, Metric]:
        """All optimizer steps of one rollout batch (arrays of TrainTensors), and what they measured."""
        arrays, metrics = dict(batch), Metrics()
        if proximal_source(self.spec, self.options) == "recomputed":
            arrays["proximal_logprobs"] = self.policy.logprobs(arrays)
            apart = np.abs(arrays["proximal_logprobs"] - arrays["behaviour_logprobs"])[arrays["loss_mask"].astype(bool)]
            # In lockstep this is what the engine and the trainer disagree by under equal weights.
            metrics.max("train/train_rollout_logprob_abs_diff_max", apart.max(initial=0.0))
        size = -(-batches.num_samples(arrays) // self.options.num_steps_per_rollout)
        for part in batches.split(arrays, size):
            self._step(part, metrics)
        return metrics.wire()

    def _step(self, part: Arrays, metrics: Metrics) -> None:
        denominators = Denominators.of(part["loss_mask"], part["rewards"])

        def loss(current: Tensor, entropy: Tensor, fields: dict[str, Tensor]) -> tuple[Tensor, Any]:
            result = objective(self.spec, self.options, current, entropy, fields, denominators)
            return result.loss, result.metrics

        step = self.policy.train(part, loss)
        for name, (total, count) in step.metrics.items():
            metrics.mean(name, total, count)
        metrics.mean("train/grad_norm", step.grad_norm, 1)
        metrics.last("train/lr", step.lr)
        metrics.last("train/step", step.step + 1)
        metrics.sum("train/skipped_steps", step.skipped)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor), on every rank; every rank must exhaust it."""
        return self.policy.state()

    def export(self, path: str) -> None:
        self.policy.save_hf(Path(path))


class Leader:
    """Rank 0's hand on all ranks: each call runs everywhere."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def train(self, batch: Arrays) -> dict[str, Metric]:
        exchange.broadcast({"do": "train"}, batch)
        return self._trainer.train(batch)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        exchange.broadcast({"do": "weights"})
        return self._trainer.weights()

    def export(self, path: Path) -> None:
        exchange.broadcast({"do": "export", "path": str(path)})
        self._trainer.export(str(path))

    def idle(self) -> None:
        exchange.broadcast({"do": "idle"})

    def end(self) -> None:
        exchange.broadcast({"do": "end"})


def follow(trainer: Trainer) -> None:
    """The life of every rank but the first: obey until told to end. A silent leader is an error of the collective."""
    commands: dict[str, Callable[[dict[str, Any], dict[str, np.ndarray]], object]] = {
        "train": lambda header, arrays: trainer.train(arrays),
        "weights": lambda header, arrays: sum(1 for _ in trainer.weights()),
        "export": lambda header, arrays: trainer.export(header["path"]),
        "idle": lambda header, arrays: None,
    }
    while True:
        header, arrays = exchange.broadcast(None)
        if header["do"] == "end":
            return
        partial(commands[header["do"]], header, arrays)()


def follow_run(context: Context) -> int:
    """A rank of the actor that has no mailbox, from start to end; returns its exit code."""
    die_with_parent()
    trainer = Trainer(context.options, None)
    follow(trainer)
    return 0
