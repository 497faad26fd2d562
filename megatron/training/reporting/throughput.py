"""How many floating-point operations an iteration takes, from the model's sizes."""

from __future__ import annotations

import argparse

from megatron.training.layout import expert_layers

MULTIPLY_ADD = 2
PASSES = 3  # forward, and in backward one GEMM for the input's gradient and one for the weight's
TERA = 1e12


def flops_of(args: argparse.Namespace, samples: int) -> float:
    """Operations of the GEMMs of one iteration over `samples` samples, forward and backward.

    Linear layers take 2 x weights x tokens in each pass; attention's two GEMMs take 2 x s x s x width each, half of it
    masked away and still computed, so counted, as Megatron-LM does. Norms, activations and softmax are left out.
    A mixture of experts counts as many experts as a token is routed to, the shared expert and the router; tokens that
    a capacity drops or padding adds are not known here.
    """
    heads_width = args.num_attention_heads * args.kv_channels
    groups_width = args.num_query_groups * args.kv_channels
    attention_weights = args.hidden_size * (2 * heads_width + 2 * groups_width)  # q and projection, k and v
    mixtures = sum(expert_layers(args))
    plain = (args.num_layers - mixtures) * _mlp_weights(args, args.ffn_hidden_size)
    mlp_weights = plain + (mixtures * _mixture_weights(args) if mixtures else 0)
    weights = args.num_layers * attention_weights + mlp_weights + args.hidden_size * args.padded_vocab_size
    tokens = samples * args.seq_length
    attention = args.num_layers * 2 * args.seq_length * heads_width * tokens
    return float(PASSES * MULTIPLY_ADD * (weights * tokens + attention))


def _mlp_weights(args: argparse.Namespace, width: int) -> int:
    return int(args.hidden_size * width * (3 if args.swiglu else 2))


def _mixture_weights(args: argparse.Namespace) -> int:
    """Those that one token meets: of its experts, the shared one and the router."""
    shared = args.moe_shared_expert_intermediate_size or 0
    routed = args.moe_router_topk * args.moe_ffn_hidden_size
    return _mlp_weights(args, routed + shared) + int(args.hidden_size * args.num_experts)


def teraflops_per_rank(args: argparse.Namespace, samples: int, seconds: float) -> float:
    """Rate of one rank over an iteration of `seconds`."""
    return flops_of(args, samples) / (seconds * args.world_size * TERA)
