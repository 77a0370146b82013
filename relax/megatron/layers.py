"""The two layers that Megatron-Core offers only with a GPU, in plain PyTorch, and the block built from them."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm behind Megatron's constructor.

    Megatron's own wrapper of it refuses sequence parallelism. With the mark on the weight, Megatron sums its gradient
    over the ranks that each saw a part of the sequence.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CausalAttention(MegatronModule):
    """Megatron's `core_attention` on scaled_dot_product_attention: causal, right-padded [tokens, batch, heads, dim].

    Right padding needs no mask: a token sees only what stands to its left.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.context_group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        if attention_mask is not None or packed_seq_params is not None:
            raise NotImplementedError("CausalAttention takes right-padded rows without a mask, neither masks nor packs")
        allowed = None
        if self.context_group is not None:
            # Ranks hold two slices of the sequence each (see `context_positions`); keys and values are gathered, and
            # what may be seen follows from the positions.
            ranks, mine, local = self.context_group.size(), self.context_group.rank(), query.size(0)
            key, value = (
                gather_from_sequence_parallel_region(
                    part.contiguous(), tensor_parallel_output_grad=True, group=self.context_group
                )
                for part in (key, value)
            )
            positions = [context_positions(local * ranks, ranks, rank) for rank in range(ranks)]
            allowed = (torch.cat(positions)[None, :] <= positions[mine][:, None]).to(query.device)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=allowed,
            is_causal=allowed is None,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
            enable_gqa=query.size(-2) != key.size(-2),
        )
        return out.permute(2, 0, 1, 3).flatten(-2)


def context_positions(tokens: int, ranks: int, rank: int) -> torch.Tensor:
    """int64 [tokens / ranks]: the positions that a context-parallel rank holds, in the order it holds them.

    The sequence is cut into 2 x ranks slices and rank r holds slices r and 2 ranks - 1 - r, as Megatron's rotary
    embedding expects; so every rank has the same share of the causal triangle. `tokens` divides by 2 x ranks.
    """
    width = tokens // (2 * ranks)
    return torch.cat([torch.arange(width) + part * width for part in (rank, 2 * ranks - 1 - rank)])


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """A decoder block of Megatron's own layers with the norm and the attention of this module."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
