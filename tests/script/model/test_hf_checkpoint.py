"""Reading a Hugging Face directory: sizes, values, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

from script.data.command_line import InputError
from script.model.architecture import LlamaArchitecture
from script.model.hf_checkpoint import HuggingFaceCheckpoint
from script.model.llama_weights import megatron_parameters

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("config", [{}, {"model_type": "mistral", "sliding_window": None}])
def test_architecture(tiny, write_hf, config):
    directory, _ = write_hf(tiny, **config)
    assert HuggingFaceCheckpoint(directory).architecture == LlamaArchitecture(
        num_layers=2, hidden_size=96, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=16,
        max_position_embeddings=64, rotary_base=5000.0, norm_epsilon=3e-5, vocab_size=296, tied=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "field", "expected"),
    [
        ({"rope_scaling": LLAMA3}, "rope_scaling_factor", 32.0),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 7.0}, "rope_theta": None}, "rope_scaling_factor", 32.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": None}, "rotary_base", 7.0),
        ({"rope_theta": None}, "rotary_base", 10000.0),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "position_divisor", 2.0),
        ({"tie_word_embeddings": True}, "tied", True),
        ({"head_dim": None, "hidden_size": 64}, "kv_channels", 16),
    ],
)
def test_forms_of_the_configuration(tiny, write_hf, config, field, expected):
    assert getattr(HuggingFaceCheckpoint(write_hf(tiny, **config)[0]).architecture, field) == expected


@pytest.mark.parametrize("shards", [1, 3])
def test_values(tiny, write_hf, shards):
    directory, weights = write_hf(tiny, shards=shards)
    checkpoint = HuggingFaceCheckpoint(directory)
    for key, value in weights.items():
        role, layer = key if isinstance(key, tuple) else (key, None)
        np.testing.assert_array_equal(checkpoint.tensor(role, layer).numpy(), value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2"}, "model type 'gpt2' is not supported, only llama and mistral and qwen2"),
        ({"model_type": None}, "model type None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"sliding_window": 4096}, "sliding_window = 4096 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size is None, a number is expected"),
        ({"num_hidden_layers": 0}, "num_layers is 0, it must be above 0"),
        ({"head_dim": 15}, "a head is 15 wide"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rotary scaling .* is not supported, only linear, and llama3",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rotary scaling .* is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types with 'sliding_attention'"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 8.0}}, "rotary scaling .* is not supported"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\.input_layernorm\.weight \(9 in all\) has no place"),
    ],
)
def test_what_is_not_a_plain_llama_is_refused(tiny, write_hf, config, message):
    directory, _ = write_hf(tiny, **config)
    with pytest.raises(InputError, match=message) as caught:
        HuggingFaceCheckpoint(directory)
    assert "\n" not in str(caught.value)


def test_qwen2_is_llama_with_biases(tiny, write_hf):
    shape = replace(tiny, qkv_bias=True)
    directory, weights = write_hf(shape, model_type="qwen2", sliding_window=4096, use_sliding_window=False)
    checkpoint = HuggingFaceCheckpoint(directory)
    assert checkpoint.architecture.qkv_bias
    np.testing.assert_array_equal(checkpoint.tensor("key_bias", 1).numpy(), weights["key_bias", 1])
    with pytest.raises(InputError, match=r"q_proj\.bias .* has no place|k_proj\.bias .* has no place"):
        HuggingFaceCheckpoint(write_hf(shape)[0])  # of the type Llama


def test_one_file_of_the_directory(tiny, write_hf):
    directory, weights = write_hf(tiny)
    (directory / "consolidated.safetensors").write_bytes(b"another copy of the weights, under other names")
    for source in (directory, directory / "model.safetensors"):
        np.testing.assert_array_equal(HuggingFaceCheckpoint(source).tensor("final_norm").numpy(), weights["final_norm"])


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickled_weights_are_refused_by_name(tiny, write_hf, name):
    directory, _ = write_hf(tiny)
    (directory / "model.safetensors").rename(directory / name)
    with pytest.raises(InputError, match=f"{name} is pickled, which is never read here"):
        HuggingFaceCheckpoint(directory)


def test_weights_that_are_no_numbers_of_training_are_refused(tiny, write_hf):
    import torch

    directory, _ = write_hf(tiny, dtype=torch.int8)
    with pytest.raises(InputError, match=r"is torch\.int8; fp32, fp16 and bf16 are read"):
        HuggingFaceCheckpoint(directory).tensor("final_norm")


def test_a_missing_tensor_is_named(tied, write_hf):
    directory, _ = write_hf(tied, tie_word_embeddings=False)
    with pytest.raises(InputError, match=r"the tensor lm_head\.weight is missing"):
        list(megatron_parameters(HuggingFaceCheckpoint(directory)))


@pytest.mark.parametrize("size", [0, 5, 0.5])
def test_a_truncated_file_is_named(tiny, write_hf, size):
    directory, _ = write_hf(tiny)
    path = directory / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(size * len(content)) if isinstance(size, float) else size])
    with pytest.raises(InputError, match=r"model\.safetensors: no safetensors file, or a broken or truncated one"):
        HuggingFaceCheckpoint(directory)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, r"no such file: .*config\.json"),
        ("config.json", "[1]", r"config\.json: no JSON object"),
        ("config.json", "{", r"config\.json: no JSON object"),
        ("model.safetensors", None, r"there is no \*\.safetensors"),
        (
            "model.safetensors.index.json",
            json.dumps({"weight_map": {"a": "../b"}}),
            r"\.\./b is not the name of a file",
        ),
        ("model.safetensors.index.json", json.dumps({"weight_map": {"a": "b"}}), "b: no safetensors file"),
    ],
)
def test_missing_and_broken_files_are_named(tiny, write_hf, name, content, message):
    directory, _ = write_hf(tiny)
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_text(content)
    with pytest.raises(InputError, match=message):
        HuggingFaceCheckpoint(directory)
