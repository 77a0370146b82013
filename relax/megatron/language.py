"""A network with the checkpoint's own output layer: it gives log-probabilities of response tokens."""

from pathlib import Path
from typing import Any

import numpy as np
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from relax.megatron import convert, model
from relax.megatron.batches import Batch
from relax.megatron.logprobs import logprob_entropy
from relax.megatron.network import Network, Outputs


class LanguageNetwork(Network):
    """The policy's network, trained or frozen. A loss function sees (current log-probs, entropy), both of
    logits / `temperature`, the sampling temperature."""

    def __init__(self, options: Any, checkpoint: str | Path, *, trainable: bool) -> None:
        super().__init__(options, checkpoint, trainable=trainable)
        self.temperature = float(options.rollout_temperature)

    def build(self, options: Any) -> GPTModel:
        return model.build(self.architecture, self.grid, self.config)

    def mapping(self) -> list[convert.Mapping]:
        return convert.mapping(self.architecture, self.grid.pipeline)

    def read(self, rows: Tensor, targets: Tensor) -> Outputs:
        return self._logprob_entropy(rows, targets, self.temperature)

    def logprobs(self, batch: Batch, temperature: float | None = None) -> np.ndarray:
        """float32 [response tokens of the batch]: log-probabilities under the present weights, forward only.

        Of logits / temperature, by default the sampling temperature. Every rank gives the same batch and gets the whole
        result. Raises BatchError.
        """
        at = self.temperature if temperature is None else temperature
        return self.forward(batch, lambda rows, targets: self._logprob_entropy(rows, targets, at))

    def _logprob_entropy(self, logits: Tensor, targets: Tensor, temperature: float) -> Outputs:
        group = parallel_state.get_tensor_model_parallel_group() if self.grid.tensor > 1 else None
        vocab = self.architecture.vocab
        return logprob_entropy(logits, targets, vocab=vocab, temperature=temperature, group=group)
