"""A Hugging Face architecture as a Megatron-Core GPTModel."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from relax.megatron import cpu
from relax.megatron.checkpoint import Architecture
from relax.megatron.layers import block_spec
from relax.megatron.parallel import Grid, GridError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def train_dtype(name: str) -> torch.dtype:
    """The dtype of the trainer's weights; with bfloat16 the optimizer keeps float32 copies of them."""
    if name not in _DTYPES:
        raise ValueError(f"--train-dtype {name}: choose one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def padded_vocab(architecture: Architecture, grid: Grid) -> int:
    """The vocabulary's size in the network: every tensor-parallel rank holds the same number of rows."""
    return -(-architecture.vocab // grid.tensor) * grid.tensor


def transformer_config(architecture: Architecture, grid: Grid, dtype: torch.dtype) -> TransformerConfig:
    """Raises GridError when the architecture cannot be cut as the grid says."""
    _check_cuts(architecture, grid)
    with warnings.catch_warnings():
        # Megatron's own default for CUDA graphs warns that it is deprecated.
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        return _transformer_config(architecture, grid, dtype)


def _transformer_config(architecture: Architecture, grid: Grid, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.query_groups,
        kv_channels=architecture.head_dim,
        ffn_hidden_size=architecture.ffn,
        layernorm_epsilon=architecture.norm_eps,
        qk_layernorm=architecture.qk_norm,
        add_qkv_bias=architecture.qkv_bias,
        add_bias_linear=False,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=grid.tensor,
        pipeline_model_parallel_size=grid.pipeline,
        context_parallel_size=grid.context,
        sequence_parallel=grid.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Micro-batches differ in length, and pipeline stages tell each other how.
        variable_seq_lengths=grid.pipeline > 1,
        # Without experts it does nothing, but the default is refused together with variable lengths.
        moe_token_dispatcher_type="alltoall",
        # The loss function divides by the counts of the whole optimizer batch. With this setting, and a count of
        # nothing, neither the schedule nor the gradient reduction scales the loss again (see Network).
        calculate_per_token_loss=True,
        # Every weight comes from a checkpoint.
        perform_initialization=False,
        use_cpu_initialization=True,
        # Fused kernels exist for GPUs with Apex or Transformer Engine only.
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )


def build(architecture: Architecture, grid: Grid, config: TransformerConfig) -> GPTModel:
    """This rank's part of the network, on this process's device, with weights still to be loaded."""
    rope: dict[str, Any] = {}
    if architecture.rope_factor is not None:
        rope = {"rope_scaling": True, "rope_scaling_factor": architecture.rope_factor}
    model = GPTModel(
        config,
        block_spec(config),
        vocab_size=padded_vocab(architecture, grid),
        max_sequence_length=architecture.max_positions,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
        share_embeddings_and_output_weights=architecture.tied,
        pre_process=grid.first_stage,
        post_process=grid.last_stage,
        **rope,
    )
    return model.to(cpu.device())


def _check_cuts(architecture: Architecture, grid: Grid) -> None:
    for what, size in (
        ("attention heads", architecture.heads),
        ("key-value heads", architecture.query_groups),
        ("feed-forward channels", architecture.ffn),
    ):
        if size % grid.tensor:
            raise GridError(f"--tensor-parallel-size {grid.tensor} does not divide the model's {size} {what}")
    if architecture.layers % grid.pipeline:
        raise GridError(
            f"--pipeline-parallel-size {grid.pipeline} does not divide the model's {architecture.layers} layers"
        )
