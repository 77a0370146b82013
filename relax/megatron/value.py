"""A network with a value head in place of the checkpoint's output layer: it gives a value for each response token."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from relax.megatron import convert, cpu, model
from relax.megatron.batches import Batch
from relax.megatron.network import Network, Outputs


class ValueHead(torch.nn.Module):
    """hidden -> 1, float32, behind the interface of Megatron's output layer; every tensor-parallel rank has all of it.

    Its weight is drawn from N(0, 1 / (hidden + 1)^2) by `seed` alone, so that all ranks of any grid hold the same and
    the first values are close to 0: the first advantages are then those of the returns, not of noise.
    """

    def __init__(self, config: TransformerConfig, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, config.hidden_size, generator=generator) / (config.hidden_size + 1)
        self.weight = torch.nn.Parameter(weight.to(config.params_dtype))
        # With this mark Megatron adds up the gradients of ranks that each saw a part of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """[S, B, hidden] -> ([S, B, 1], no bias); under sequence parallelism from this rank's part of S to all of S."""
        values = F.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # Every rank goes on with all values and computes the same loss, so its own part of the gradient is whole.
            values = tensor_parallel.gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class ValueNetwork(Network):
    """The checkpoint's trunk with a new head. A loss function sees (values,).

    The value of a response token is that of the state before it: read at the position that predicts it.
    """

    def build(self, options: Any) -> GPTModel:
        # Untied, since the embedding serves as no output layer here, on no pipeline stage.
        built = model.build(replace(self.architecture, tied=False), self.grid, self.config)
        if self.grid.last_stage:
            built.output_layer = ValueHead(self.config, options.seed).to(cpu.device())
        return built

    def mapping(self) -> list[convert.Mapping]:
        return convert.value_mapping(self.architecture, self.grid.pipeline)

    def read(self, rows: Tensor, targets: Tensor) -> Outputs:
        return (rows.squeeze(-1).float(),)

    def values(self, batch: Batch) -> np.ndarray:
        """float32 [response tokens of the batch]: values under the present weights, forward only.

        Every rank gives the same batch and gets the whole result. Raises BatchError.
        """
        return self.forward(batch, self.read)
