"""The model: Megatron's GPTModel built from the flags, and the wrappers that training puts around it."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

import torch
from torch.nn import functional

from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fp8_utils import correct_amax_history_if_needed
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.training.layer_spec import block_spec
from megatron.training.te_layer_spec import engine_fields

# Field of TransformerConfig <- flag destination, where the names differ.
_FIELDS = {
    "layernorm_epsilon": "norm_epsilon",
    "gated_linear_unit": "swiglu",
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
# fmt: off
_SAME_NAME = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "normalization", "layernorm_zero_centered_gamma", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
    "rotary_interleaved", "hidden_dropout", "attention_dropout", "attention_softmax_in_fp32",
    "calculate_per_token_loss", "sequence_parallel", "bf16", "fp16", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "context_parallel_size", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl",
    "deterministic_mode", "recompute_granularity", "recompute_method", "recompute_num_layers",
    "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
    "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_router_topk",
    "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_num_groups",
    "moe_router_group_topk", "moe_router_dtype", "moe_router_enable_expert_bias", "moe_router_bias_update_rate",
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps",
    "moe_token_dispatcher_type", "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
)
# fmt: on
_PARTITION_DIM = {layers.VocabParallelEmbedding: 0, layers.ColumnParallelLinear: 0, layers.RowParallelLinear: 1}


def model_config(args: argparse.Namespace) -> TransformerConfig:
    """The TransformerConfig that the flags in `args` describe."""
    on_gpu = torch.cuda.is_available()
    same_name = {name: getattr(args, name) for name in _SAME_NAME}
    renamed = {field: getattr(args, name) for field, name in _FIELDS.items()}
    interleaved = args.virtual_pipeline_model_parallel_size is not None
    overlap_p2p = interleaved and args.overlap_p2p_comm  # which the plain schedule does not have
    return TransformerConfig(
        **same_name,
        **renamed,
        **_fusions(args, on_gpu),
        **engine_fields(args),
        activation_func=_activation(args),
        init_method=_normal(args.init_method_std),
        params_dtype=compute_dtype(args),
        pipeline_dtype=compute_dtype(args),
        overlap_p2p_comm=overlap_p2p,
        batch_p2p_comm=not overlap_p2p,
        use_cpu_initialization=args.use_cpu_initialization or not on_gpu,
        perform_initialization=not getattr(args, "weights_are_loaded", False),
        persist_layer_norm=False,
    )


def build_model(
    args: argparse.Namespace, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> GPTModel:
    """This pipeline stage's part of the model, bare, in the compute dtype, on the current device.

    Args:
        args: The flags, with `padded_vocab_size` set; an attribute `weights_are_loaded` that is true leaves the
            weights uninitialised.
        pre_process: The stage holds the embedding.
        post_process: The stage holds the output head and computes the loss.
        vp_stage: Number of the model chunk of this stage under an interleaved schedule.
    """
    config = model_config(args)
    model = GPTModel(
        config,
        block_spec(args, config, vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        vp_stage=vp_stage,
    )
    _mark_partitions(model)
    return model.cuda(torch.cuda.current_device())


def _mark_partitions(model: torch.nn.Module) -> None:
    """Say of every parameter whether tensor parallel ranks hold shards or copies of it.

    Upstream says so while it initialises weights, hence not for weights that come from a checkpoint; the gradient norm
    would then count the first rank's shard alone.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if type(module) in _PARTITION_DIM and weight is not None and not hasattr(weight, "partition_dim"):
            layers.set_tensor_model_parallel_attributes(weight, True, _PARTITION_DIM[type(module)], 1)
    for parameter in model.parameters():
        layers.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)


def build_bare_chunks(args: argparse.Namespace) -> list[GPTModel]:
    """The model chunks of this rank, in their order from input to output; one without an interleaved schedule."""
    numbers: list[int | None] = list(range(args.virtual_pipeline_model_parallel_size or 0)) or [None]
    return [
        build_model(
            args,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
            vp_stage=number,
        )
        for number in numbers
    ]


def wrap_for_training(args: argparse.Namespace, chunks: list[GPTModel]) -> list[DistributedDataParallel]:
    """`chunks` in Float16Module (for --bf16 and --fp16) and megatron-core's DistributedDataParallel."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
        fp8_param_gather=args.fp8_param_gather,
    )
    half = args.bf16 or args.fp16
    wrapped = [Float16Module(chunk.config, chunk) if half else chunk for chunk in chunks]
    correct_amax_history_if_needed(wrapped)  # of FP8 weights, which the cast to half counts as new ones
    model = [
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(wrapped)
    ]
    if args.data_parallel_random_init:
        for chunk in model:
            chunk.broadcast_params()
    return model


def unwrap(module: torch.nn.Module) -> Any:
    """The GPTModel inside DistributedDataParallel and Float16Module."""
    while isinstance(getattr(module, "module", None), torch.nn.Module):
        module = module.module
    return module


def compute_dtype(args: argparse.Namespace) -> torch.dtype:
    """The dtype of parameters and activations."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else torch.float32


def _activation(args: argparse.Namespace) -> Any:
    if args.swiglu:
        return functional.silu
    return squared_relu if args.squared_relu else functional.gelu


def _normal(std: float) -> Any:
    return lambda tensor: torch.nn.init.normal_(tensor, mean=0.0, std=std)


def _fusions(args: argparse.Namespace, on_gpu: bool) -> dict[str, bool]:
    """Fused kernels: all of them are made for CUDA, and some come with packages that may not be there."""
    bias_activation = args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion
    return {
        "bias_activation_fusion": on_gpu and bias_activation and not args.squared_relu,
        "bias_dropout_fusion": on_gpu and args.bias_dropout_fusion,
        "masked_softmax_fusion": on_gpu and args.masked_softmax_fusion and _importable("scaled_masked_softmax_cuda"),
        "gradient_accumulation_fusion": on_gpu
        and args.gradient_accumulation_fusion
        and _importable("fused_weight_gradient_mlp_cuda"),
        "apply_rope_fusion": on_gpu
        and args.apply_rope_fusion
        and args.position_embedding_type == "rope"
        and not args.rotary_interleaved
        and _importable("transformer_engine"),
    }


def _importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
