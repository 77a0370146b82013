"""One network over the grid: built from a checkpoint, run forward and backward over a batch, given back as tensors.

What a trainer of any kind needs and no more: the policy adds an optimizer; a frozen reference is a network that is not
trained; a value model is one with another head.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from relax.megatron import batches, convert, cpu, exchange, model, parallel
from relax.megatron.batches import Batch, Micro
from relax.megatron.checkpoint import Tensors, read_architecture
from relax.megatron.layers import context_positions
from relax.megatron.logprobs import logprob_entropy

Sums = dict[str, tuple[float, float]]
_LOSS = ""  # the loss travels among the metrics, under a name that none of them has
Pairs = dict[str, Tensor]  # (sum, count), float64 [2], still on the device
# (current log-probs [B, T], entropy [B, T], fields of the micro-batch) -> (its share of the loss, metric sums)
LossFunction = Callable[[Tensor, Tensor, dict[str, Tensor]], tuple[Tensor, dict[str, tuple[Any, Any]]]]


class Network:
    """This rank's part of a network; every method that computes is collective over all ranks.

    Nothing scales what a loss function returns: the sum of its losses over all micro-batches and data-parallel ranks
    is the loss of the optimizer step, and its gradient is the one applied. Megatron would otherwise divide by the
    number of micro-batches and of ranks; `calculate_per_token_loss` with a token count that is never used turns that
    off.
    """

    def __init__(self, options: Any, checkpoint: str | Path, *, trainable: bool) -> None:
        self.grid = parallel.initialize(options)
        self.checkpoint = Path(checkpoint)
        self.architecture = read_architecture(checkpoint)
        self.micro_batch_size = int(options.micro_batch_size)
        dtype = model.train_dtype(options.train_dtype)
        self.config = model.transformer_config(self.architecture, self.grid, dtype)
        self.model: GPTModel = model.build(self.architecture, self.grid, self.config)
        convert.load(self.model, Tensors(checkpoint), self.architecture, self.grid)
        self.module: torch.nn.Module = Float16Module(self.config, self.model) if self.config.bf16 else self.model
        if trainable:
            self.config.finalize_model_grads_func = _finalize
            self.module = DistributedDataParallel(
                self.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), self.module
            )
        else:
            self.module.requires_grad_(False)
        self._micro: Micro | None = None
        if self.grid.last_stage and not self.grid.sequence_parallel:
            # Only what predicts a response token goes through the output layer. Under sequence parallelism the output
            # layer itself gathers the sequence, so there the choice is made behind it.
            self.model.output_layer.register_forward_pre_hook(self._choose_hidden)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole network; a tied output layer is no second one."""
        table = convert.mapping(self.architecture, self.grid.pipeline)
        return sum(int(np.prod(shape)) for entry in table for shape in entry.shapes)

    def logprobs(self, batch: Batch, temperature: float) -> np.ndarray:
        """float32, one a response token of the batch: log-probabilities under the present weights, forward only.

        Every rank gives the same batch and gets the whole result.
        """
        batches.check(batch)
        result = torch.zeros(int(batch["response_lens"].sum()), dtype=torch.float32, device=cpu.device())

        def keep(logp: Tensor, _entropy: Tensor, micro: Micro) -> tuple[Tensor, Pairs]:
            if not micro.idle:
                result[micro.first_token : micro.first_token + len(logp)] = logp
            return logp.sum(), {}

        self.module.eval()
        with torch.no_grad():
            self._run(batch, temperature, keep, forward_only=True)
        # Each token was written by one data-parallel rank on the last stage and is 0 elsewhere: the sum is exact.
        for group in self._result_groups():
            dist.all_reduce(result, group=group)
        return result.cpu().numpy()

    def backward(self, batch: Batch, temperature: float, loss_fn: LossFunction) -> tuple[float, Sums]:
        """Loss and gradients of one optimizer step's batch, reduced over all ranks; returns (loss, metric sums).

        `loss_fn` sees each micro-batch once and divides by counts of the whole batch, so that its losses add up.
        """

        def weigh(logp: Tensor, entropy: Tensor, micro: Micro) -> tuple[Tensor, Pairs]:
            if micro.idle:
                return 0.0 * logp.sum(), {}
            loss, sums = loss_fn(micro.pad(logp), micro.pad(entropy), micro.fields)
            # A loss that depends on no token (all masked) must still have a backward pass, on every rank alike.
            loss = loss.float() + 0.0 * logp.sum()
            return loss, {_LOSS: _pair(loss, 1.0)} | {
                name: _pair(total, count) for name, (total, count) in sums.items()
            }

        self.module.train()
        self.module.zero_grad_buffer()  # type: ignore[operator]
        total: dict[str, Tensor] = {}
        for pairs in self._run(batch, temperature, weigh, forward_only=False):
            for name, pair in pairs.items():
                total[name] = total[name] + pair if name in total else pair
        # One transfer from the device for all names.
        values = torch.stack(list(total.values())).tolist() if total else []
        local = {name: (value, count) for name, (value, count) in zip(total, values, strict=True)}
        reduced = exchange.sum_metrics(local, self._result_groups())
        loss, _ = reduced.pop(_LOSS)
        return loss, reduced

    def state(self, *, gradients: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor), one after another on every rank; see `convert.export`."""
        return convert.export(self.model, self.architecture, self.grid, gradients=gradients)

    def _run(
        self,
        batch: Batch,
        temperature: float,
        finish: Callable[[Tensor, Tensor, Micro], tuple[Tensor, Pairs]],
        *,
        forward_only: bool,
    ) -> list[Pairs]:
        start, stop = batches.share(batches.num_samples(batch), self.grid.data_rank, self.grid.data)
        multiple = (self.grid.tensor if self.grid.sequence_parallel else 1) * (
            2 * self.grid.context if self.grid.context > 1 else 1
        )
        micros = batches.micro_batches(
            batch, start, stop, self.micro_batch_size, multiple=multiple, device=cpu.device()
        )

        def step(iterator: Iterator[Micro], module: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            micro = next(iterator)
            self._micro = micro
            output = module(self._local_tokens(micro), None, None)

            def loss(output: Tensor) -> tuple[Tensor, Tensor, Pairs]:
                value, sums = finish(*self._token_values(output, micro, temperature), micro)
                return value, torch.zeros((), dtype=torch.int32, device=value.device), sums

            return output, loss

        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(micros),
            model=[self.module],
            num_microbatches=len(micros),
            seq_length=micros[0].tokens.shape[1],
            micro_batch_size=micros[0].tokens.shape[0],
            forward_only=forward_only,
        )

    def _token_values(self, output: Tensor, micro: Micro, temperature: float) -> tuple[Tensor, Tensor]:
        """(log-prob, entropy), [n] each, of the micro-batch's response tokens; the same on every rank of this share."""
        here, position = self._here(micro)
        logits = output[micro.row[here], position] if self.grid.sequence_parallel else output.squeeze(0)
        group = parallel_state.get_tensor_model_parallel_group() if self.grid.tensor > 1 else None
        logp, entropy = logprob_entropy(
            logits, micro.target[here], vocab=self.architecture.vocab, temperature=temperature, group=group
        )
        if self.grid.context == 1:
            return logp, entropy
        both = torch.stack([logp, entropy]).new_zeros(2, len(micro.row))
        both = both.index_put((torch.arange(2, device=both.device)[:, None], here[None]), torch.stack([logp, entropy]))
        logp, entropy = _SumOverContext.apply(both, parallel_state.get_context_parallel_group())
        return logp, entropy

    def _choose_hidden(self, _layer: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """[S, B, hidden] -> [n, 1, hidden]: the rows that predict a response token."""
        assert self._micro is not None
        here, position = self._here(self._micro)
        return (inputs[0][position, self._micro.row[here]].unsqueeze(1), *inputs[1:])

    def _here(self, micro: Micro) -> tuple[Tensor, Tensor]:
        """(indices of the response tokens predicted on this context-parallel rank, their positions in its slice)."""
        if self.grid.context == 1:
            return torch.arange(len(micro.row), device=micro.row.device), micro.position
        mine = context_positions(micro.tokens.shape[1], self.grid.context, self.grid.context_rank).to(micro.row.device)
        place = torch.full((micro.tokens.shape[1],), -1, device=mine.device)
        place[mine] = torch.arange(len(mine), device=mine.device)
        local = place[micro.position]
        here = torch.nonzero(local >= 0).squeeze(-1)
        return here, local[here]

    def _local_tokens(self, micro: Micro) -> Tensor:
        if self.grid.context == 1:
            return micro.tokens
        mine = context_positions(micro.tokens.shape[1], self.grid.context, self.grid.context_rank)
        return micro.tokens[:, mine.to(micro.tokens.device)]

    def _result_groups(self) -> list[dist.ProcessGroup]:
        """Groups that, one after the other, add every share's result on the last stage and tell it to all stages.

        Context-parallel ranks of a share hold the same result and are no part of the sum.
        """
        return [parallel_state.get_data_parallel_group(), parallel_state.get_pipeline_model_parallel_group()]


class _SumOverContext(torch.autograd.Function):
    """Joins values of which each context-parallel rank holds some and zeros elsewhere.

    Every rank computes the same loss from the joined values, and the gradients of their weights are added over the
    ranks, so the gradient passes back as it is.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        joined = values.clone()
        dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _pair(total: Any, count: Any) -> Tensor:
    both = [torch.as_tensor(value, dtype=torch.float64, device=cpu.device()).detach() for value in (total, count)]
    return torch.stack(both)


def _finalize(modules: list[torch.nn.Module], _num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    finalize_model_grads(modules, None, **kwargs)
