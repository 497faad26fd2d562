"""The mapping of Llama tensors to Megatron's parameters."""

import numpy as np
import pytest
import torch

from script.data.command_line import InputError
from script.model.gguf_checkpoint import GgufCheckpoint
from script.model.hf_checkpoint import HuggingFaceCheckpoint
from script.model.llama_weights import group_rows, half_layout, load_into, megatron_parameters


def test_half_layout_puts_even_channels_first():
    w = torch.arange(16.0).reshape(8, 2)  # two heads of four rows
    assert half_layout(w, heads=2)[:, 0].tolist() == [0, 4, 2, 6, 8, 12, 10, 14]


def test_group_rows_keeps_a_group_together():
    def rows(*values):
        return torch.tensor(values, dtype=torch.float32)[:, None]

    # four query heads and two key/value heads, one row wide
    grouped = group_rows(rows(0, 1, 2, 3), rows(10, 11), rows(20, 21), groups=2)
    assert grouped[:, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


@pytest.mark.parametrize("tie", [False, True])
def test_both_kinds_of_file_give_every_parameter(request, write_gguf, write_hf, tie):
    shape = request.getfixturevalue("tied" if tie else "tiny")
    gguf_path, _ = write_gguf(shape)
    hf_path, _ = write_hf(shape)
    parameters = {}
    for checkpoint in (GgufCheckpoint(gguf_path), HuggingFaceCheckpoint(hf_path)):
        shapes = {name: tuple(value.shape) for name, value in megatron_parameters(checkpoint)}
        assert len(shapes) == 2 + 6 * shape.layers + (not tie)
        parameters[type(checkpoint)] = shapes
    assert parameters[GgufCheckpoint] == parameters[HuggingFaceCheckpoint]
    assert shapes["decoder.layers.1.self_attention.linear_qkv.weight"] == (128, 96)
    assert shapes["decoder.layers.1.mlp.linear_fc1.weight"] == (128, 96)
    assert ("output_layer.weight" in shapes) is not tie


def test_the_checkpoint_is_read_in_its_own_precision(tiny, write_hf):
    directory, _ = write_hf(tiny, dtype=torch.bfloat16)
    assert {value.dtype for _, value in megatron_parameters(HuggingFaceCheckpoint(directory))} == {torch.bfloat16}


class Holder(torch.nn.Module):
    """Parameters under given names."""

    def __init__(self, shapes):
        super().__init__()
        self.values = {name: torch.nn.Parameter(torch.full(size, 7.0)) for name, size in shapes.items()}

    def named_parameters(self):
        return iter(self.values.items())


@pytest.fixture
def checkpoint(tiny, write_gguf):
    return GgufCheckpoint(write_gguf(tiny)[0])


@pytest.fixture
def shapes(checkpoint):
    return {name: tuple(value.shape) for name, value in megatron_parameters(checkpoint)}


def test_vocabulary_padding_becomes_zero(tiny, checkpoint, shapes):
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        shapes[name] = (tiny.vocab + 8, tiny.hidden)
    model = Holder(shapes)
    load_into(model, checkpoint)
    for name, value in megatron_parameters(checkpoint):
        np.testing.assert_array_equal(model.values[name].detach()[: len(value)], value)
        assert not model.values[name].detach()[len(value) :].any()


def test_a_parameter_without_a_tensor_is_named(checkpoint, shapes):
    model = Holder(shapes | {"decoder.layers.0.mlp.linear_fc1.bias": (3,)})
    with pytest.raises(
        InputError, match=r"nothing for the model's parameter decoder\.layers\.0\.mlp\.linear_fc1\.bias"
    ):
        load_into(model, checkpoint)


def test_a_tensor_without_a_parameter_is_named(checkpoint, shapes):
    del shapes["decoder.final_layernorm.weight"]
    with pytest.raises(InputError, match=r"no parameter decoder\.final_layernorm\.weight"):
        load_into(Holder(shapes), checkpoint)


def test_another_size_is_named(checkpoint, shapes):
    shapes["decoder.layers.0.mlp.linear_fc2.weight"] = (96, 60)
    with pytest.raises(
        InputError, match=r"linear_fc2\.weight is \[96, 60\] in the model, \[96, 64\] in the checkpoint"
    ):
        load_into(Holder(shapes), checkpoint)
