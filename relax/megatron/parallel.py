"""The process grid of a trainer: who shares a tensor, a pipeline, a sequence or a batch with whom.

Ranks come from torchrun's environment; without it the process is the whole grid. Megatron-Core keeps the grid in
process-wide state, so a process has one, whatever number of networks it holds.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from relax.megatron import cpu

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_timeout = 1800.0  # of the grid's collectives, seconds; a process has one grid


class GridError(ValueError):
    """Parallel sizes that do not fit each other, the processes or the model; the text says which and what fits."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes of the grid and this process's place in it."""

    rank: int
    world: int
    tensor: int
    tensor_rank: int
    pipeline: int
    pipeline_rank: int
    context: int
    context_rank: int
    data: int
    data_rank: int
    sequence_parallel: bool

    @property
    def first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1


@dataclass(frozen=True, slots=True)
class Groups:
    """Whose shards make a whole tensor: the ranks of its cuts, and the stages of the model."""

    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup

    @classmethod
    def of_grid(cls) -> "Groups":
        """Those that training uses."""
        return cls(parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group())

    @classmethod
    def apart(cls) -> "Groups":
        """The same ranks in groups of their own, for tensors in host memory: gathers in one thread and training in
        another never meet in a collective. Collective over all ranks."""
        grid = cls.of_grid()
        return cls(_again(grid.tensor), _again(grid.pipeline))


def new_group(ranks: list[int] | None = None) -> dist.ProcessGroup:
    """A group of `ranks` (None: all) over gloo, with the grid's timeout. All ranks call it, members or not."""
    return dist.new_group(ranks, timedelta(seconds=_timeout), backend="gloo")


def _again(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A second group of the ranks of `group`, one of several equally large ones that every rank is in one of."""
    mine = torch.tensor(dist.get_process_group_ranks(group), device=cpu.device())
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    made = {ranks: new_group(list(ranks)) for ranks in sorted({tuple(theirs.tolist()) for theirs in everyones})}
    return made[tuple(mine.tolist())]


def initialize(options: Any, *, timeout: float = 1800.0) -> Grid:
    """Joins the grid of `options`' parallel sizes, or returns it when this process joined it already.

    `timeout`: seconds that a collective waits for the others before it fails on this rank. Collective over all ranks.
    Raises GridError when the sizes do not divide the number of processes or differ from the grid joined before.
    """
    tensor, pipeline, context = (
        int(options.tensor_parallel_size),
        int(options.pipeline_parallel_size),
        int(options.context_parallel_size),
    )
    if int(getattr(options, "expert_parallel_size", 1) or 1) != 1:
        raise GridError("--expert-parallel-size must be 1: the supported models (Llama, Qwen2, Qwen3) have no experts")
    if not parallel_state.model_parallel_is_initialized():
        global _timeout
        _timeout = timeout
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        _check_sizes(tensor, pipeline, context, world)
        if not dist.is_initialized():
            _join(world, timeout)
        parallel_state.initialize_model_parallel(tensor, pipeline, context_parallel_size=context)
        tensor_parallel.model_parallel_cuda_manual_seed(options.seed)
        torch.manual_seed(options.seed)
    grid = Grid(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        context=parallel_state.get_context_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        data=parallel_state.get_data_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        sequence_parallel=bool(options.sequence_parallel) and tensor > 1,
    )
    if (grid.tensor, grid.pipeline, grid.context) != (tensor, pipeline, context):
        raise GridError(
            f"this process already is in a grid of tensor {grid.tensor} x pipeline {grid.pipeline} x context "
            f"{grid.context}; it cannot also be one of {tensor} x {pipeline} x {context}"
        )
    return grid


def shutdown() -> None:
    """Leaves the grid; safe to call when none was joined."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_sizes(tensor: int, pipeline: int, context: int, world: int) -> None:
    model = tensor * pipeline * context
    if world % model:
        raise GridError(
            f"--tensor-parallel-size {tensor} x --pipeline-parallel-size {pipeline} x --context-parallel-size "
            f"{context} = {model} processes hold one model, which does not divide the {world} processes started; "
            f"set `ranks` of the actor in the topology to a multiple of {model}"
        )


def _join(world: int, timeout: float) -> None:
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if all(name in os.environ for name in _TORCHRUN):
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    elif world == 1:
        # A store in this process's memory: a single rank needs no port.
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=timeout)
        )
    else:
        missing = ", ".join(name for name in _TORCHRUN if name not in os.environ)
        raise GridError(f"WORLD_SIZE is {world} but {missing} is not set: start the ranks through torchrun")
