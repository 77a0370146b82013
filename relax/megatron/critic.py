"""The critic: PPO's value model, which learns beside the policy."""

from pathlib import Path
from typing import Any

import numpy as np

from relax.megatron.batches import Batch
from relax.megatron.learner import Learner
from relax.megatron.optimizer import Schedule
from relax.megatron.value import ValueNetwork


class Critic(Learner[ValueNetwork]):
    """The value model over all ranks of the critic. The loss function of `train` sees (values [B, T], fields).

    It starts from the trunk of `hf_checkpoint`, the policy's, with a head drawn from the seed. `total_steps` is the
    number of its optimizer steps in the run, None when it is unknown. Reads what the policy reads from options, but
    critic_lr in place of lr; the shape of the schedule, min_lr included, is the policy's. `state` gives the head under
    `score.weight`, transformers' name in a sequence classifier.
    Raises CheckpointError, GridError and ValueError, each naming what to change.
    """

    def __init__(self, options: Any, hf_checkpoint: str | Path, total_steps: int | None = None) -> None:
        schedule = Schedule.from_options(options, options.critic_lr, total_steps)
        super().__init__(ValueNetwork(options, hf_checkpoint, trainable=True), options, schedule)

    def values(self, batch: Batch) -> np.ndarray:
        """float32 [response tokens of the batch], forward only: values[t] is the value of the state from which response
        token t is predicted. Raises BatchError."""
        return self.network.values(batch)
