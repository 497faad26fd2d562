"""Reading GGUF: sizes, values, and what is refused."""

from dataclasses import replace

import gguf
import numpy as np
import pytest

from script.data.command_line import InputError
from script.model.architecture import LlamaArchitecture
from script.model.gguf_checkpoint import GgufCheckpoint
from script.model.llama_weights import megatron_parameters
from script.model.rope_scaling import llama3_divisors


def test_architecture(tiny, write_gguf):
    path, _ = write_gguf(tiny)
    assert GgufCheckpoint(path).architecture == LlamaArchitecture(
        num_layers=2, hidden_size=96, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=16,
        max_position_embeddings=64, rotary_base=5000.0, norm_epsilon=3e-5, vocab_size=296, tied=False,
    )  # fmt: skip


def test_what_a_header_may_leave_out(tiny, write_gguf):
    shape = replace(tiny, groups=4, head_width=24)
    header = {"attention.head_count_kv": None, "attention.key_length": None, "rope.freq_base": None}
    architecture = GgufCheckpoint(write_gguf(shape, **header)[0]).architecture
    assert (architecture.num_query_groups, architecture.kv_channels, architecture.rotary_base) == (4, 24, 10000.0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_quantised_tensors_are_dequantised(tiny, write_gguf, kind):
    path, weights = write_gguf(tiny, quantise=kind)
    stored = gguf.GGMLQuantizationType[kind]
    expected = gguf.quants.dequantize(gguf.quants.quantize(weights["down", 1], stored), stored)
    read = GgufCheckpoint(path).tensor("down", 1).numpy()
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, expected)
    assert 0 < np.abs(read - weights["down", 1]).max() < 0.2


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2' is not supported, only 'llama'"),
        ({"expert_count": 8}, "a mixture of 8 experts"),
        ({"block_count": None}, r"llama\.block_count is missing"),
        ({"rope.dimension_count": 8}, r"rope\.dimension_count is 8"),
        ({"attention.value_length": 32}, r"attention\.value_length is 32"),
        ({"attention.head_count_kv": [2, 4]}, "differs from layer to layer"),
        ({"attention.head_count_kv": 3}, "4 query heads can not be shared by 3"),
        ({"attention.head_count": 0}, "num_attention_heads is 0, it must be above 0"),
        ({"rope.scaling.type": "yarn"}, "rotary scaling 'yarn'"),
        ({"block_count": 1}, r"blk\.1\.attn_k\.weight \(9 in all\) has no place"),
    ],
)
def test_what_is_not_a_plain_llama_is_refused(tiny, write_gguf, header, message):
    path, _ = write_gguf(tiny, **header)
    with pytest.raises(InputError, match=message) as caught:
        GgufCheckpoint(path)
    assert "\n" not in str(caught.value)


def test_a_missing_tensor_is_named(tiny, write_gguf):
    checkpoint = GgufCheckpoint(write_gguf(tiny, block_count=3)[0])
    with pytest.raises(InputError, match=r"the tensor blk\.2\.attn_norm\.weight is missing"):
        list(megatron_parameters(checkpoint))


def test_a_tensor_of_another_size_is_named(tiny, write_gguf):
    checkpoint = GgufCheckpoint(write_gguf(tiny, feed_forward_length=60)[0])
    with pytest.raises(InputError, match=r"gate of layer 0 has the shape \[64, 96\], \[60, 96\] is expected"):
        list(megatron_parameters(checkpoint))


@pytest.mark.parametrize("size", [0, 3, 50, 2000, 0.5, 0.999])
def test_a_truncated_file_is_named(tiny, write_gguf, size):
    path, _ = write_gguf(tiny)
    content = path.read_bytes()
    path.write_bytes(content[: int(size * len(content)) if isinstance(size, float) else size])
    with pytest.raises(InputError, match="no GGUF file, or a broken or truncated one") as caught:
        GgufCheckpoint(path)
    assert str(path) in str(caught.value)


def test_llama3_rotary_factors(tiny, write_gguf):
    shape = replace(tiny, rotary_base=500000.0)
    checkpoint = GgufCheckpoint(write_gguf(shape)[0])
    assert checkpoint.architecture.rope_scaling_factor is None
    divisors = llama3_divisors(shape.head_width, shape.rotary_base, 32.0).astype(np.float32)
    for values, expected in ((divisors, 32.0), (divisors[::-1].copy(), None)):
        checkpoint._tensors["rope_freqs.weight"] = type("Stored", (), {"data": values})
        if expected is None:
            with pytest.raises(InputError, match=r"rope_freqs\.weight is not Llama 3\.1's"):
                checkpoint._read_architecture()
        else:
            assert checkpoint._read_architecture().rope_scaling_factor == expected
