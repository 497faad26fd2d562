"""The count of operations, against torch's own count of what a forward and backward of the built model run."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.training.arguments import arguments_with
from megatron.training.reporting.throughput import flops_of, teraflops_per_rank

SEQUENCE, SAMPLES = 32, 2
SIZES = {
    "num_layers": 3,
    "hidden_size": 48,
    "ffn_hidden_size": 80,
    "num_attention_heads": 4,
    "seq_length": SEQUENCE,
    "vocab_size": 256,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "position_embedding_type": "rope",
}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "add_bias_linear": False}
MODELS = {
    "gelu": {},
    "swiglu": {"swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm"},
    "grouped queries of another width": {"group_query_attention": True, "num_query_groups": 2, "kv_channels": 20},
    "experts": EXPERTS,
    "experts in some layers, and a shared one": EXPERTS
    | {"swiglu": True, "moe_layer_freq": [0, 1, 1], "moe_shared_expert_intermediate_size": 40},
    "tied head": {"untie_embeddings_and_output_weights": False},
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_every_gemm_is_counted(changes, one_rank):
    from megatron.core import tensor_parallel
    from megatron.training.model import build_model

    tensor_parallel.model_parallel_cuda_manual_seed(1)
    args = arguments_with(**({"untie_embeddings_and_output_weights": True} | SIZES | changes))
    args.world_size = 1
    model = build_model(args)
    ids = torch.zeros(SAMPLES, SEQUENCE, dtype=torch.long)
    positions = torch.arange(SEQUENCE).expand(SAMPLES, -1)
    with FlopCounterMode(display=False) as counter:
        model(ids, positions, None, labels=ids).sum().backward()
    assert flops_of(args, SAMPLES) == counter.get_total_flops()


def test_the_rate_is_one_ranks():
    args = arguments_with(**SIZES)
    args.world_size = 4
    assert teraflops_per_rank(args, SAMPLES, 0.5) == pytest.approx(flops_of(args, SAMPLES) / 0.5 / 4 / 1e12)
