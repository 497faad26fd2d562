"""What the layers are built of: for each --transformer-impl a function that returns megatron-core's specification."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.training.norm import Norm


def block_spec(args: argparse.Namespace, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The specification of this pipeline stage's layers.

    Args:
        args: The flags.
        config: Made of them.
        vp_stage: Number of the model chunk of this stage under an interleaved schedule.
    """
    layer = LAYERS[args.transformer_impl](args)
    stage = [layer] * get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=stage, layer_norm=Norm)


def _local_layer(args: argparse.Namespace) -> ModuleSpec:
    """A layer of megatron-core's own modules, with the norms of this trainer."""
    layer = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if args.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = Norm
    return layer


LAYERS: dict[str, Callable[[argparse.Namespace], ModuleSpec]] = {"local": _local_layer}
