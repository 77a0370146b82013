"""Weights between Hugging Face names and Megatron-Core's, bit-exact both ways, for any tensor and pipeline size.

`mapping` is the one table of a language model, `value_mapping` that of a value model. Loading reads tensors one
parameter at a time; exporting streams whole tensors in the table's order and is collective: every rank takes part and
every rank gets every tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from relax.megatron.checkpoint import Architecture, CheckpointError, Source
from relax.megatron.layout import Columns, Gated, Layout, QueryGroups, Replicated, Vocabulary
from relax.megatron.parallel import Grid, Groups

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
VALUE_HEAD = "score.weight"  # what transformers calls it in its sequence classifiers
_OUTPUT = "output_layer.weight"


@dataclass(frozen=True, slots=True)
class Mapping:
    """One Megatron parameter, the pipeline stage that owns it, and the Hugging Face tensors it holds."""

    parameter: str  # its name on its stage: layers count from 0 there
    stage: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layout: Layout
    # "copy": loaded, but exported by another entry. "new": exported, but no checkpoint of a language model holds it.
    origin: Literal["checkpoint", "copy", "new"] = "checkpoint"


def mapping(arch: Architecture, stages: int = 1) -> list[Mapping]:
    """Every parameter of the language model, in the order of the network, over so many pipeline stages.

    A tied output layer is the embedding itself on a single stage; the last of several keeps a copy.
    """
    names, shapes = (EMBEDDING if arch.tied else LM_HEAD,), ((arch.vocab, arch.hidden),)
    table = _trunk(arch, stages)
    if not arch.tied or stages > 1:
        origin: Literal["copy", "checkpoint"] = "copy" if arch.tied else "checkpoint"
        table.append(Mapping(_OUTPUT, stages - 1, names, shapes, Vocabulary(), origin))
    return table


def value_mapping(arch: Architecture, stages: int = 1) -> list[Mapping]:
    """Every parameter of the value model: the language model's, less its output layer, and the value head."""
    head = Mapping(_OUTPUT, stages - 1, (VALUE_HEAD,), ((1, arch.hidden),), Replicated(), "new")
    return [*_trunk(arch, stages), head]


def _trunk(arch: Architecture, stages: int) -> list[Mapping]:
    hidden = arch.hidden
    vocabulary = ((arch.vocab, hidden),)
    table = [Mapping("embedding.word_embeddings.weight", 0, (EMBEDDING,), vocabulary, Vocabulary())]
    per_stage = arch.layers // stages
    for layer in range(arch.layers):
        stage, local = divmod(layer, per_stage)
        table += [
            Mapping(
                f"decoder.layers.{local}.{suffix}",
                stage,
                tuple(f"model.layers.{layer}.{name}" for name in names),
                shapes,
                layout,
            )
            for suffix, names, shapes, layout in _layer(arch)
        ]
    norm = ("model.norm.weight",)
    table.append(Mapping("decoder.final_layernorm.weight", stages - 1, norm, ((hidden,),), Replicated()))
    return table


_Row = tuple[str, tuple[str, ...], tuple[tuple[int, ...], ...], Layout]


def _layer(arch: Architecture) -> list[_Row]:
    h, d = arch.hidden, arch.head_dim
    q, kv, ffn = arch.heads * d, arch.query_groups * d, arch.ffn
    qkv = tuple(f"self_attn.{part}_proj" for part in "qkv")
    rows: list[_Row] = [
        ("input_layernorm.weight", ("input_layernorm.weight",), ((h,),), Replicated()),
        (
            "self_attention.linear_qkv.weight",
            tuple(f"{name}.weight" for name in qkv),
            ((q, h), (kv, h), (kv, h)),
            QueryGroups(),
        ),
    ]
    if arch.qkv_bias:
        biases = tuple(f"{name}.bias" for name in qkv)
        rows.append(("self_attention.linear_qkv.bias", biases, ((q,), (kv,), (kv,)), QueryGroups()))
    if arch.qk_norm:
        rows += [
            ("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), ((d,),), Replicated()),
            ("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), ((d,),), Replicated()),
        ]
    return [
        *rows,
        ("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), ((h, q),), Columns()),
        ("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), ((h,),), Replicated()),
        ("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), ((ffn, h), (ffn, h)), Gated()),
        ("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), ((h, ffn),), Columns()),
    ]


@torch.no_grad()
def load(
    model: GPTModel, source: Source, table: list[Mapping], arch: Architecture, grid: Grid, *, exact: bool = False
) -> None:
    """Fills this rank's part of `model` from `source`, cast to the model's dtype, and marks what is cut.

    Parameters that `table` calls new stay as they are. Raises CheckpointError, before anything is changed, when the
    source lacks a tensor, holds one that the network has no place for, or one of another shape than config.json says.
    `exact` allows no tensor beside those that are loaded; without it, what transformers would ignore is.
    """
    _check(source, table, arch, exact)
    parameters = dict(model.named_parameters())
    filled = set()
    for entry in table:
        if entry.stage != grid.pipeline_rank:
            continue
        parameter = parameters[entry.parameter]
        if entry.origin != "new":
            parameter.copy_(entry.layout.cut(list(source.read(entry.names)), arch, grid.tensor_rank, grid.tensor))
        _mark(parameter, entry.layout)
        filled.add(entry.parameter)
    if unfilled := parameters.keys() - filled:
        raise RuntimeError(f"no weights for the parameters {_list(unfilled)}: the mapping lacks them")


def _mark(parameter: Tensor, layout: Layout) -> None:
    # Megatron sets these only where it also initializes a weight. Without them the gradient norm takes the parameter
    # for a replica and counts the part of tensor-parallel rank 0 alone: clipping would be wrong without any sign of it.
    if layout.dim is not None:
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        parameter.partition_dim = layout.dim  # type: ignore[attr-defined]
        parameter.partition_stride = 1  # type: ignore[attr-defined]


def _check(source: Source, table: list[Mapping], arch: Architecture, exact: bool) -> None:
    loaded = [entry for entry in table if entry.origin != "new"]
    expected = {name: shape for entry in loaded for name, shape in zip(entry.names, entry.shapes, strict=True)}
    unknown = source.shapes.keys() - expected.keys()
    if not exact:
        # Some writers store a tied output layer and the rotary frequencies; and a value model has another head.
        unknown = {name for name in unknown - {LM_HEAD} if not name.endswith("rotary_emb.inv_freq")}
    missing = expected.keys() - source.shapes.keys()
    problems = [f"lacks {_list(missing)}"] if missing else []
    problems += [f"holds {_list(unknown)}, which a {arch.model_type} model has no place for"] if unknown else []
    if problems:
        raise CheckpointError(f"{source}: {' and '.join(problems)}")
    for name, shape in expected.items():
        if source.shapes[name] != shape:
            raise CheckpointError(
                f"{source}: {name} has shape {list(source.shapes[name])}, config.json says {list(shape)}"
            )


def _list(names: set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


@dataclass(frozen=True, slots=True)
class Shards:
    """This rank's tensors under the names of its parameters, and the groups in which they are made whole.

    A rank that takes no part in that has no tensors; all ranks of a group take part or none.
    """

    tensors: dict[str, Tensor]
    groups: Groups

    @classmethod
    def of(cls, model: GPTModel) -> "Shards":
        """The weights of `model` as they are: an optimizer step changes them."""
        return cls({name: parameter.detach() for name, parameter in model.named_parameters()}, Groups.of_grid())


@torch.no_grad()
def export(shards: Shards, table: list[Mapping], arch: Architecture, grid: Grid) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of every tensor, in the order of `table`. Collective over the model's ranks.

    The tensors are new storage on the shards' device, so a later change of the shards does not change them.
    """
    if not shards.tensors:
        return
    some = next(iter(shards.tensors.values()))
    for entry in table:
        if entry.origin == "copy":
            continue
        if grid.pipeline_rank == entry.stage:
            whole = entry.layout.join(_gathered(shards, entry, grid), arch)
        else:
            whole = [torch.empty(shape, dtype=some.dtype, device=some.device) for shape in entry.shapes]
        for name, tensor in zip(entry.names, whole, strict=True):
            yield name, _from_stage(tensor, entry.stage, shards.groups.pipeline, grid)


def _gathered(shards: Shards, entry: Mapping, grid: Grid) -> list[Tensor]:
    local = shards.tensors[entry.parameter]
    if grid.tensor == 1 or entry.layout.dim is None:
        return [local]
    local = local.contiguous()
    gathered = [torch.empty_like(local) for _ in range(grid.tensor)]
    dist.all_gather(gathered, local, group=shards.groups.tensor)
    return gathered


def _from_stage(tensor: Tensor, stage: int, group: dist.ProcessGroup, grid: Grid) -> Tensor:
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    if grid.pipeline > 1:
        dist.broadcast(tensor, dist.get_global_rank(group, stage), group=group)
    return tensor
