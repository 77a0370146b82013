"""The policy: a language model that learns, as the actor uses it."""

from pathlib import Path
from typing import Any

import numpy as np

from relax.megatron.batches import Batch
from relax.megatron.export import save_hf
from relax.megatron.language import LanguageNetwork
from relax.megatron.learner import Learner
from relax.megatron.optimizer import Schedule


class Policy(Learner[LanguageNetwork]):
    """The policy over all ranks of the actor. The loss function of `train` sees (current log-probs, entropy, fields).

    `hf_checkpoint` is a Hugging Face directory (Llama, Qwen2, Qwen3). `total_steps` is the number of optimizer steps of
    the run, None when it is unknown. Reads from options: the parallel sizes, seed, train_dtype, micro_batch_size,
    rollout_temperature, lr*, min_lr, weight_decay, adam_*, clip_grad.
    Raises CheckpointError, GridError and ValueError, each naming what to change.
    """

    def __init__(self, options: Any, hf_checkpoint: str | Path, total_steps: int | None = None) -> None:
        schedule = Schedule.from_options(options, options.lr, total_steps)
        super().__init__(LanguageNetwork(options, hf_checkpoint, trainable=True), options, schedule)

    def logprobs(self, batch: Batch, temperature: float | None = None) -> np.ndarray:
        """float32 [response tokens of the batch]: log-probabilities under the present weights, forward only.

        Of logits / temperature, by default the sampling temperature. Raises BatchError.
        """
        return self.network.logprobs(batch, temperature)

    def save_hf(self, path: str | Path) -> None:
        """Writes a Hugging Face model directory; rank 0 writes. Raises FileExistsError when `path` exists."""
        save_hf(self.network, Path(path))
