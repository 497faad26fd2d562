"""Layers over the pipeline's stages and chunks, and which of them have experts."""

import pytest

from megatron.training.layout import expert_layers, virtual_stages


@pytest.mark.parametrize(
    ("flags", "chunks"),
    [
        ({}, None),
        ({"num_layers_per_virtual_pipeline_stage": 1}, 4),
        ({"num_layers_per_virtual_pipeline_stage": 2}, 2),
        ({"num_layers_per_virtual_pipeline_stage": 4}, None),  # one chunk is no interleaving
        ({"num_virtual_stages_per_pipeline_rank": 2}, 2),
        ({"num_virtual_stages_per_pipeline_rank": 1}, None),
    ],
)
def test_chunks_of_a_stage(parse, monkeypatch, flags, chunks):
    monkeypatch.setenv("WORLD_SIZE", "2")
    args = parse(num_layers=8, pipeline_model_parallel_size=2, global_batch_size=2, **flags)
    assert args.virtual_pipeline_model_parallel_size == virtual_stages(args) == chunks


@pytest.mark.parametrize(
    ("frequency", "layers"), [(1, "1111"), (2, "1010"), (3, "1001"), ("[0,1,1,0]", "0110"), ("([0]+[1]*1)*2", "0101")]
)
def test_layers_with_experts(parse, frequency, layers):
    args = parse(num_layers=4, num_experts=4, moe_layer_freq=frequency)
    assert expert_layers(args) == [layer == "1" for layer in layers]


def test_without_experts_no_layer_has_any(parse):
    args = parse(num_layers=4)
    assert expert_layers(args) == [False] * 4
    assert args.moe_ffn_hidden_size is None


def test_widths_and_lists_that_follow_from_others(parse):
    args = parse(num_experts=4, ffn_hidden_size=96, moe_router_load_balancing_type=["none"], moe_aux_loss_coeff=[0.5])
    assert (args.moe_ffn_hidden_size, args.expert_tensor_parallel_size) == (96, 1)
    assert (args.moe_router_load_balancing_type, args.moe_aux_loss_coeff) == ("none", 0.5)
