"""One network over the grid: built from a checkpoint, run forward and backward over a batch, given back as tensors.

What a trainer of any kind needs and no more. What comes out of the network's last layer is the business of its kinds:
`language.LanguageNetwork` makes log-probs of it, `value.ValueNetwork` values.
"""

from abc import ABC, abstractmethod
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

Sums = dict[str, tuple[float, float]]
_LOSS = ""  # the loss travels among the metrics, under a name that none of them has
Pairs = dict[str, Tensor]  # (sum, count), float64 [2], still on the device
Outputs = tuple[Tensor, ...]  # of response tokens, float32 [n] each
# (rows of the last layer that predict n response tokens [n, width], those tokens int64 [n]) -> their outputs
Read = Callable[[Tensor, Tensor], Outputs]
# (each output [B, T]..., fields of the micro-batch) -> (its share of the loss, metric sums)
LossFunction = Callable[..., tuple[Tensor, dict[str, tuple[Any, Any]]]]


class Network(ABC):
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
        self.model = self.build(options)
        self.table = self.mapping()
        convert.load(self.model, Tensors(checkpoint), self.table, self.architecture, self.grid)
        self.module: torch.nn.Module = Float16Module(self.config, self.model) if self.config.bf16 else self.model
        if trainable:
            self.config.finalize_model_grads_func = _finalize
            self.module = DistributedDataParallel(
                self.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), self.module
            )
        else:
            self.module.requires_grad_(False)
        self._micro: Micro | None = None
        # Called at each micro-batch, by the thread that computes: a sign that it gets on.
        self.moved: Callable[[], None] = lambda: None
        if self.grid.last_stage and not self.grid.sequence_parallel:
            # Only what predicts a response token goes through the output layer. Under sequence parallelism the output
            # layer itself gathers the sequence, so there the choice is made behind it.
            self.model.output_layer.register_forward_pre_hook(self._choose_hidden)

    # --- what a kind of network fills in -----------------------------------------------------------------------------

    @abstractmethod
    def build(self, options: Any) -> GPTModel:
        """This rank's part of the model, on its device; what `mapping` loads is still to be loaded."""

    @abstractmethod
    def mapping(self) -> list[convert.Mapping]:
        """Every parameter of the whole model and its Hugging Face names."""

    @abstractmethod
    def read(self, rows: Tensor, targets: Tensor) -> Outputs:
        """What a loss function sees of n response tokens, see `Read`."""

    # --- what all kinds do -------------------------------------------------------------------------------------------

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole network; a tied output layer is no second one."""
        held = (entry for entry in self.table if entry.origin != "copy")
        return sum(int(np.prod(shape)) for entry in held for shape in entry.shapes)

    def forward(self, batch: Batch, read: Read) -> np.ndarray:
        """float32, one a response token of the batch: the first output of `read` under the present weights.

        Every rank gives the same batch and gets the whole result. Raises BatchError.
        """
        batches.check(batch)
        result = torch.zeros(int(batch["response_lens"].sum()), dtype=torch.float32, device=cpu.device())

        def keep(outputs: Outputs, micro: Micro) -> tuple[Tensor, Pairs]:
            if not micro.idle:
                result[micro.first_token : micro.first_token + len(outputs[0])] = outputs[0]
            return outputs[0].sum(), {}

        self.module.eval()
        with torch.no_grad():
            self._run(batch, read, keep, forward_only=True)
        # Each token was written by one data-parallel rank on the last stage and is 0 elsewhere: the sum is exact.
        for group in self._result_groups():
            dist.all_reduce(result, group=group)
        return result.cpu().numpy()

    def backward(self, batch: Batch, loss_fn: LossFunction) -> tuple[float, Sums]:
        """Loss and gradients of one optimizer step's batch, reduced over all ranks; returns (loss, metric sums).

        `loss_fn` sees each micro-batch once and divides by counts of the whole batch, so that its losses add up.
        """

        def weigh(outputs: Outputs, micro: Micro) -> tuple[Tensor, Pairs]:
            if micro.idle:
                return 0.0 * outputs[0].sum(), {}
            loss, sums = loss_fn(*map(micro.pad, outputs), micro.fields)
            # A loss that depends on no token (all masked) must still have a backward pass, on every rank alike.
            loss = loss.float() + 0.0 * outputs[0].sum()
            return loss, {_LOSS: _pair(loss, 1.0)} | {
                name: _pair(total, count) for name, (total, count) in sums.items()
            }

        self.module.train()
        self.module.zero_grad_buffer()  # type: ignore[operator]
        total: dict[str, Tensor] = {}
        for pairs in self._run(batch, self.read, weigh, forward_only=False):
            for name, pair in pairs.items():
                total[name] = total[name] + pair if name in total else pair
        # One transfer from the device for all names.
        values = torch.stack(list(total.values())).tolist() if total else []
        local = {name: (value, count) for name, (value, count) in zip(total, values, strict=True)}
        reduced = exchange.sum_metrics(local, self._result_groups())
        loss, _ = reduced.pop(_LOSS)
        return loss, reduced

    def shards(self) -> convert.Shards:
        """This rank's weights as they are: an optimizer step changes them."""
        return convert.Shards.of(self.model)

    def gradients(self) -> convert.Shards:
        """This rank's reduced float32 gradients of the last backward pass."""
        own = {name: p.main_grad for name, p in self.model.named_parameters()}
        return convert.Shards(own, parallel.Groups.of_grid())

    def state(self, shards: convert.Shards | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor), one after another on every rank; see `convert.export`.

        Of `shards`, which are this network's own unless others of the same names and shapes are given.
        """
        return convert.export(shards or self.shards(), self.table, self.architecture, self.grid)

    def _run(
        self,
        batch: Batch,
        read: Read,
        finish: Callable[[Outputs, Micro], tuple[Tensor, Pairs]],
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
            self.moved()
            micro = next(iterator)
            self._micro = micro
            output = module(self._local_tokens(micro), None, None)

            def loss(output: Tensor) -> tuple[Tensor, Tensor, Pairs]:
                value, sums = finish(self._outputs(output, micro, read), micro)
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

    def _outputs(self, output: Tensor, micro: Micro, read: Read) -> Outputs:
        """The outputs of the micro-batch's response tokens, [n] each; the same on every rank of this share."""
        here, position = self._here(micro)
        rows = output[micro.row[here], position] if self.grid.sequence_parallel else output.squeeze(0)
        outputs = read(rows, micro.target[here])
        if self.grid.context == 1:
            return outputs
        stacked = torch.stack(outputs)
        kinds = torch.arange(len(outputs), device=stacked.device)[:, None]
        joined = stacked.new_zeros(len(outputs), len(micro.row)).index_put((kinds, here[None]), stacked)
        return tuple(_SumOverContext.apply(joined, parallel_state.get_context_parallel_group()))

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
