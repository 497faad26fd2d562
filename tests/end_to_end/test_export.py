"""A model from Hugging Face, trained in a layout without learning anything, and exported again: the same bits.

With a learning rate that moves no weight the checkpoint that training writes holds what was imported, cut into the
layout's pieces, with an optimizer's state and padding of the vocabulary beside it; none of it may show in the export.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from script.model.export_checkpoint import export_checkpoint
from script.model.import_checkpoint import import_checkpoint
from tests.end_to_end.conftest import FFN, GROUPS, HEADS, HIDDEN, SEQUENCE

LAYERS, VOCABULARY = 4, 251
NO_STEP = ["--lr", "1e-30", "--min-lr", "1e-30", "--train-iters", 2, "--save-interval", 2]
TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
LAYOUTS = {
    "TP 2 x PP 2": (4, [TENSOR, 2, PIPELINE, 2, "--sequence-parallel"]),
    "PP 2 x DP 2, distributed optimizer": (4, [PIPELINE, 2, "--use-distributed-optimizer"]),
    "PP 2, interleaved": (2, [PIPELINE, 2, "--num-layers-per-virtual-pipeline-stage", 1]),
}
pytestmark = [pytest.mark.matrix, pytest.mark.usefixtures("reads_checkpoints")]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A Hugging Face directory of random weights, in float32."""
    directory = tmp_path_factory.mktemp("source")
    width = HIDDEN // HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (GROUPS * width, HIDDEN),
        "self_attn.v_proj": (GROUPS * width, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN),
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
    }  # fmt: skip
    names = {f"model.layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in shapes.items()}
    names |= {"model.embed_tokens": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (VOCABULARY, HIDDEN)}
    random = torch.Generator().manual_seed(1)
    save_file(
        {f"{name}.weight": torch.randn(shape, generator=random) * 0.05 for name, shape in names.items()},
        directory / "model.safetensors",
    )
    config = {
        "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "max_position_embeddings": SEQUENCE,
        "vocab_size": VOCABULARY,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_export_of_any_layout_has_the_bits_of_the_import(train, source, tmp_path, layout):
    ranks, flags = LAYOUTS[layout]
    import_checkpoint(source, tmp_path / "imported", dtype="fp32")
    load = ["--load", tmp_path / "imported", "--use-checkpoint-args", "--save", tmp_path / "trained"]
    train(*load, *NO_STEP, *flags, ranks=ranks)
    export_checkpoint(tmp_path / "trained", tmp_path / "out", iteration="2")
    ours, expected = load_file(tmp_path / "out" / "model.safetensors"), load_file(source / "model.safetensors")
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name].view(torch.int32), tensor.view(torch.int32)) for name, tensor in expected.items())
