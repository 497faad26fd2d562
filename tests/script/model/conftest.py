"""A tiny Llama with random weights, written as GGUF and as a Hugging Face directory, and a plain forward of its own.

The forward shares nothing with the importer or with megatron-core: float64 numpy, one head and one position at a time,
rotary positions as complex numbers. It takes the weights as the files hold them, each layout with its own pairing of
channels.
"""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest


@dataclass(frozen=True)
class Shape:
    layers: int = 2
    hidden: int = 96
    ffn: int = 64
    heads: int = 4
    groups: int = 2
    head_width: int = 16  # not hidden / heads
    vocab: int = 296
    rotary_base: float = 5000.0
    epsilon: float = 3e-5
    tied: bool = False
    qkv_bias: bool = False


MODEL_NAMES = {  # role -> GGUF, Hugging Face
    "embedding": ("token_embd", "model.embed_tokens"),
    "final_norm": ("output_norm", "model.norm"),
    "head": ("output", "lm_head"),
}
LAYER_NAMES = {
    "attention_norm": ("attn_norm", "input_layernorm"),
    "query": ("attn_q", "self_attn.q_proj"),
    "key": ("attn_k", "self_attn.k_proj"),
    "value": ("attn_v", "self_attn.v_proj"),
    "attention_output": ("attn_output", "self_attn.o_proj"),
    "mlp_norm": ("ffn_norm", "post_attention_layernorm"),
    "gate": ("ffn_gate", "mlp.gate_proj"),
    "up": ("ffn_up", "mlp.up_proj"),
    "down": ("ffn_down", "mlp.down_proj"),
}


BIASES = {role: (None, f"self_attn.{name}_proj") for role, name in zip(("query", "key", "value"), "qkv", strict=True)}


def random_weights(shape, seed=0):
    """{role or (role, layer): float32 array [out, in]}, of a size that keeps every part of the model in play."""
    random = np.random.default_rng(seed)
    query, key = shape.heads * shape.head_width, shape.groups * shape.head_width
    sizes = {
        "query": (query, shape.hidden),
        "key": (key, shape.hidden),
        "value": (key, shape.hidden),
        "attention_output": (shape.hidden, query),
        "gate": (shape.ffn, shape.hidden),
        "up": (shape.ffn, shape.hidden),
        "down": (shape.hidden, shape.ffn),
    }

    def matrix(rows, columns):
        return (random.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns)).astype(np.float32)

    def norm():
        return random.uniform(0.5, 1.5, shape.hidden).astype(np.float32)

    weights = {"embedding": matrix(shape.vocab, shape.hidden), "final_norm": norm()}
    if not shape.tied:
        weights["head"] = matrix(shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        weights |= {(role, layer): matrix(*size) for role, size in sizes.items()}
        weights |= {(role, layer): norm() for role in ("attention_norm", "mlp_norm")}
        if shape.qkv_bias:
            weights |= {(f"{role}_bias", layer): matrix(1, sizes[role][0])[0] for role in BIASES}
    return weights


def file_names(weights, column):
    """{tensor name in the file: array}; column 0 is GGUF, 1 Hugging Face."""
    prefix = ("blk.", "model.layers.")[column]
    names = {}
    for key, array in weights.items():
        if isinstance(key, tuple) and key[0].endswith("_bias"):
            names[f"{prefix}{key[1]}.{BIASES[key[0].removesuffix('_bias')][column]}.bias"] = array
        elif isinstance(key, tuple):
            names[f"{prefix}{key[1]}.{LAYER_NAMES[key[0]][column]}.weight"] = array
        else:
            names[f"{MODEL_NAMES[key][column]}.weight"] = array
    return names


def reference_logits(weights, shape, ids, pairing):
    """Logits [tokens, vocab] in float64. pairing: "interleaved" (2i, 2i + 1) or "half" (i, i + d/2)."""
    w = {key: value.astype(np.float64) for key, value in weights.items()}
    half = shape.head_width // 2
    first, second = (
        (np.arange(0, 2 * half, 2), np.arange(1, 2 * half, 2))
        if pairing == "interleaved"
        else (np.arange(half), np.arange(half) + half)
    )

    def norm(x, weight):
        return x / np.sqrt((x * x).mean() + shape.epsilon) * weight

    def rotate(vector, position):
        turned = (vector[first] + 1j * vector[second]) * np.exp(
            1j * position * shape.rotary_base ** (-np.arange(half) * 2.0 / shape.head_width)
        )
        result = np.empty_like(vector)
        result[first], result[second] = turned.real, turned.imag
        return result

    def head_of(x, role, layer, head):
        rows = slice(head * shape.head_width, (head + 1) * shape.head_width)
        return np.array([w[role, layer][rows] @ row for row in x])

    def attention(x, layer):
        outputs = []
        for head in range(shape.heads):
            group = head // (shape.heads // shape.groups)
            q = [rotate(row, t) for t, row in enumerate(head_of(x, "query", layer, head))]
            k = [rotate(row, t) for t, row in enumerate(head_of(x, "key", layer, group))]
            v = head_of(x, "value", layer, group)
            rows = []
            for t in range(len(x)):
                scores = np.array([q[t] @ k[s] for s in range(t + 1)]) / np.sqrt(shape.head_width)
                p = np.exp(scores - scores.max())
                rows.append(p / p.sum() @ v[: t + 1])
            outputs.append(rows)
        return np.concatenate(outputs, axis=1) @ w["attention_output", layer].T

    x = w["embedding"][ids]
    for layer in range(shape.layers):
        x = x + attention(np.array([norm(row, w["attention_norm", layer]) for row in x]), layer)
        y = np.array([norm(row, w["mlp_norm", layer]) for row in x])
        gate = y @ w["gate", layer].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["up", layer].T)) @ w["down", layer].T
    return np.array([norm(row, w["final_norm"]) for row in x]) @ w.get("head", w["embedding"]).T


def _byte_tokens(count):
    """The 256 byte tokens, "<|endoftext|>", a control token, and merges of digits and letters up to `count`."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "\u0120 the", "1 2", "a n", "an d"]
    tokens = ["<|endoftext|>", "<|im_end|>", *alphabet, *(merge.replace(" ", "") for merge in merges)]
    tokens += [f"<unused{index}>" for index in range(count - len(tokens))]
    kinds = [3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens]
    return tokens, kinds, merges


@pytest.fixture
def tiny():
    return Shape()


@pytest.fixture
def write_gguf(tmp_path):
    """`write_gguf(shape, **header)` -> (path, weights as the file holds them: interleaved rotary layout).

    header: fields that replace the right ones, None leaves one out. `weights` and `quantise` (a GGML type name for the
    matrices of the layers) replace the tensors.
    """
    import gguf

    def write(shape, *, architecture="llama", weights=None, quantise=None, tokenizer=True, **header):
        weights = random_weights(shape) if weights is None else weights
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        fields = {
            "block_count": shape.layers,
            "context_length": 64,
            "embedding_length": shape.hidden,
            "feed_forward_length": shape.ffn,
            "attention.head_count": shape.heads,
            "attention.head_count_kv": shape.groups,
            "attention.key_length": shape.head_width,
            "rope.freq_base": shape.rotary_base,
            "attention.layer_norm_rms_epsilon": shape.epsilon,
        } | header
        for name, value in fields.items():
            add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}.get(type(value))
            if isinstance(value, list):
                writer.add_array(f"{architecture}.{name}", value)
            elif add is not None:
                add(f"{architecture}.{name}", value)
        if tokenizer:
            tokens, kinds, merges = _byte_tokens(shape.vocab)
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("smollm")
            writer.add_token_list(tokens)
            writer.add_token_types(kinds)
            writer.add_token_merges(merges)
            writer.add_eos_token_id(1)
        for name, array in file_names(weights, 0).items():
            if quantise and name.startswith("blk.") and array.ndim == 2:
                kind = gguf.GGMLQuantizationType[quantise]
                writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path, weights

    return write


@pytest.fixture
def write_hf(tmp_path):
    """`write_hf(shape, shards=1, **config)` -> (directory, weights as the files hold them: half rotary layout)."""
    import torch
    from safetensors.torch import save_file

    def write(shape, *, shards=1, weights=None, dtype=torch.float32, **config):
        weights = random_weights(shape) if weights is None else weights
        directory = tmp_path / "hf"
        directory.mkdir(exist_ok=True)
        settings = {
            "model_type": "llama",
            "num_hidden_layers": shape.layers,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.ffn,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.groups,
            "head_dim": shape.head_width,
            "max_position_embeddings": 64,
            "rope_theta": shape.rotary_base,
            "rms_norm_eps": shape.epsilon,
            "vocab_size": shape.vocab,
            "tie_word_embeddings": shape.tied,
            "hidden_act": "silu",
        } | config
        settings = {name: value for name, value in settings.items() if value is not None}
        (directory / "config.json").write_text(json.dumps(settings))
        tensors = {name: torch.from_numpy(array).to(dtype) for name, array in file_names(weights, 1).items()}
        if shards == 1:
            save_file(tensors, directory / "model.safetensors")
            return directory, weights
        located = {name: f"model-{index % shards:05d}.safetensors" for index, name in enumerate(sorted(tensors))}
        for file in set(located.values()):
            save_file({name: tensors[name] for name in tensors if located[name] == file}, directory / file)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": located}))
        return directory, weights

    return write


@pytest.fixture
def reference():
    return reference_logits


@pytest.fixture
def tied(tiny):
    return replace(tiny, tied=True)
