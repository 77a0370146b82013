"""The reference: a language model that does not learn, only gives log-probs and takes over published weights."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from relax.megatron import convert
from relax.megatron.batches import Batch
from relax.megatron.checkpoint import Held
from relax.megatron.language import LanguageNetwork


class Reference:
    """The reference policy over all ranks of its service: weights alone, without optimizer or gradients.

    `checkpoint` is a Hugging Face directory (Llama, Qwen2, Qwen3). Reads from options: the parallel sizes, seed,
    train_dtype, micro_batch_size, rollout_temperature. Raises CheckpointError, GridError and ValueError, each naming
    what to change.
    """

    def __init__(self, options: Any, checkpoint: str | Path) -> None:
        self.network = LanguageNetwork(options, checkpoint, trainable=False)

    def logprobs(self, batch: Batch) -> np.ndarray:
        """float32 [response tokens of the batch]: log-probabilities of logits / the sampling temperature.

        Collective: every rank gives the same batch. Raises BatchError.
        """
        return self.network.logprobs(batch)

    def load(self, tensors: Iterable[tuple[str, Tensor]], origin: str = "the published weights") -> None:
        """Takes over (Hugging Face name, whole tensor) of a version of the policy, in place and bit-exact.

        Every rank gives all of them and keeps its part; they are copied, and held together until then, so give views
        of shared memory. Raises CheckpointError, naming `origin` and the tensors, with the weights unchanged, when the
        names or shapes are not exactly those of this model.
        """
        network = self.network
        held = Held(tensors, origin)
        convert.load(network.model, held, network.table, network.architecture, network.grid, exact=True)
