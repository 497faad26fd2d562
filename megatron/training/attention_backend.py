"""`--attention-backend` for the local layers: which class computes their attention."""

from __future__ import annotations

import argparse

import torch

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.flash_attention import FlashAttention
from megatron.training.failure import UsageError

LARGEST_HEAD = 256  # features of a head that flash kernels of GPUs take


def core_attention(args: argparse.Namespace) -> type[torch.nn.Module]:
    """megatron-core's unfused attention, or a flash kernel.

    Raises:
        UsageError: for what the flash kernel of this machine can not do.
    """
    if args.attention_backend != "flash":
        return DotProductAttention
    on_gpu = torch.cuda.is_available()
    if not on_gpu and args.attention_dropout > 0:
        raise UsageError(
            f"--attention-backend flash has no dropout on a CPU, and --attention-dropout is {args.attention_dropout}; "
            "set it to 0, or use unfused"
        )
    if on_gpu and not (args.bf16 or args.fp16):
        raise UsageError("--attention-backend flash needs --bf16 or --fp16 on a GPU; or use unfused")
    if on_gpu and args.kv_channels > LARGEST_HEAD:
        raise UsageError(
            f"--attention-backend flash takes heads of up to {LARGEST_HEAD} features, not {args.kv_channels}; "
            "use unfused"
        )
    return FlashAttention
