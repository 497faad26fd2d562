"""How many floating-point operations an iteration takes, from the model's sizes."""

from __future__ import annotations

import argparse

MULTIPLY_ADD = 2
PASSES = 3  # forward, and in backward one GEMM for the input's gradient and one for the weight's
TERA = 1e12


def flops_of(args: argparse.Namespace, samples: int) -> float:
    """Operations of the GEMMs of one iteration over `samples` samples, forward and backward.

    Linear layers take 2 x weights x tokens in each pass; attention's two GEMMs take 2 x s x s x width each, half of it
    masked away and still computed, so counted, as Megatron-LM does. Norms, activations and softmax are left out.
    """
    heads_width = args.num_attention_heads * args.kv_channels
    groups_width = args.num_query_groups * args.kv_channels
    attention_weights = args.hidden_size * (2 * heads_width + 2 * groups_width)  # q and projection, k and v
    mlp_weights = args.hidden_size * args.ffn_hidden_size * (3 if args.swiglu else 2)
    layer_weights = attention_weights + mlp_weights
    weights = args.num_layers * layer_weights + args.hidden_size * args.padded_vocab_size
    tokens = samples * args.seq_length
    attention = args.num_layers * 2 * args.seq_length * heads_width * tokens
    return float(PASSES * MULTIPLY_ADD * (weights * tokens + attention))


def teraflops_per_rank(args: argparse.Namespace, samples: int, seconds: float) -> float:
    """Rate of one rank over an iteration of `seconds`."""
    return flops_of(args, samples) / (seconds * args.world_size * TERA)
