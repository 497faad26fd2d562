"""What the layers are built of: for each --transformer-impl a function that returns megatron-core's specification."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.training.attention_backend import core_attention
from megatron.training.flags.kernels import ENGINE, LOCAL
from megatron.training.layout import expert_layers
from megatron.training.norm import Norm
from megatron.training.te_layer_spec import te_layer, te_norm


def block_spec(args: argparse.Namespace, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The specification of this pipeline stage's layers.

    Args:
        args: The flags.
        config: Made of them.
        vp_stage: Number of the model chunk of this stage under an interleaved schedule.
    """
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    has_experts = expert_layers(args)[first : first + get_num_layers_to_build(config, vp_stage=vp_stage)]
    layer = LAYERS[args.transformer_impl]
    layers = {mixture: layer(args, args.num_experts if mixture else None) for mixture in set(has_experts)}
    norm = te_norm() if args.transformer_impl == ENGINE else Norm
    return TransformerBlockSubmodules(layer_specs=[layers[mixture] for mixture in has_experts], layer_norm=norm)


def _local_layer(args: argparse.Namespace, num_experts: int | None) -> ModuleSpec:
    """A layer of megatron-core's own modules, with the norms of this trainer; experts run one after the other."""
    layer = get_gpt_layer_local_spec(
        num_experts=num_experts, qk_layernorm=args.qk_layernorm, normalization=args.normalization
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = core_attention(args)
    if args.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return layer


# Name of a --transformer-impl -> (arguments, experts of this layer or None) -> its specification.
LAYERS: dict[str, Callable[[argparse.Namespace, int | None], ModuleSpec]] = {LOCAL: _local_layer, ENGINE: te_layer}
