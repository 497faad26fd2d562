"""What the flags of parallelism and of experts imply: sizes that follow from others, and which layers have experts.

Pure arithmetic on parsed arguments: nothing here needs torch.
"""

from __future__ import annotations

import argparse
from typing import Any


def complete_layout(args: argparse.Namespace) -> None:
    """Fill in what follows (idempotent); values that do not fit are left for the tables of checks to name."""
    args.virtual_pipeline_model_parallel_size = virtual_stages(args)
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size
    if args.num_experts is not None and args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        setattr(args, name, _single(getattr(args, name)))


def virtual_stages(args: argparse.Namespace) -> int | None:
    """Model chunks of each pipeline stage under the interleaved schedule; None without it, as with one chunk."""
    stages = args.num_virtual_stages_per_pipeline_rank
    if args.num_layers_per_virtual_pipeline_stage is not None:
        stages = args.num_layers // args.pipeline_model_parallel_size // args.num_layers_per_virtual_pipeline_stage
    return stages if stages and stages > 1 else None


def is_uneven(args: argparse.Namespace) -> bool:
    """Whether the first or the last pipeline stage has a number of layers of its own."""
    return args.decoder_first_pipeline_num_layers is not None or args.decoder_last_pipeline_num_layers is not None


def middle_layers(args: argparse.Namespace) -> tuple[int, int]:
    """(layers, stages) that are left when the first and the last stage have the layers they were given."""
    given = [args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers]
    ends = [layers for layers in given if layers is not None]
    return args.num_layers - sum(ends), args.pipeline_model_parallel_size - len(ends)


def expert_layers(args: argparse.Namespace) -> list[bool]:
    """For each layer whether its MLP is a mixture of experts."""
    if args.num_experts is None:
        return [False] * args.num_layers
    frequency = args.moe_layer_freq
    if isinstance(frequency, list):
        return [bool(layer) for layer in frequency]
    return [layer % frequency == 0 for layer in range(args.num_layers)]


def _single(values: Any) -> Any:
    """The element of a list of one, as Megatron-LM has it; anything else as it is."""
    return values[0] if isinstance(values, list) and len(values) == 1 else values
