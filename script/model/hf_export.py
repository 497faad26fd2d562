"""A Llama-type checkpoint as the directory that Hugging Face transformers loads.

    config.json                                       LlamaForCausalLM; with biases on queries, keys, values Qwen2's
    model.safetensors                                 or, beyond the largest size allowed,
    model-00001-of-00003.safetensors, ...             shards with
    model.safetensors.index.json                      their index

Of what the checkpoint does not say nothing is made up: there is no generation_config.json, and the ids of begin and end
of sequence are null unless a tokenizer names its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from script.model.architecture import LlamaArchitecture
from script.model.hf_checkpoint import CONFIG_FILE, INDEX_FILE, LLAMA3_SCALING, SINGLE_FILE, tensor_name
from script.model.llama_weights import LlamaCheckpoint, layer_roles, read_half, tensor_shapes
from script.model.safetensors_writer import Entry, shards, write_safetensors

if TYPE_CHECKING:
    from torch import Tensor

TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

Role = tuple[str, int | None]


def write_hugging_face(
    checkpoint: LlamaCheckpoint, directory: Path, *, dtype: str, max_shard_bytes: int, eos: int | None = None
) -> None:
    """Write a model into an empty directory, holding one tensor at a time.

    Args:
        checkpoint: the model.
        directory: it is there.
        dtype: what the weights are rounded to, a key of TORCH_NAMES.
        max_shard_bytes: of tensors in one file.
        eos: id of the end of a sequence; None: not known.

    Raises:
        InputError: a tensor is missing or has another shape than the architecture says.
    """
    shapes = tensor_shapes(checkpoint.architecture)
    roles = {tensor_name(role, layer): (role, layer) for role, layer in _roles(checkpoint.architecture)}
    entries = [Entry(name, shapes[role]) for name, (role, _) in roles.items()]
    files = shards(entries, dtype, max_shard_bytes)
    names = [SINGLE_FILE] if len(files) == 1 else _shard_names(len(files))
    for name, content in zip(names, files, strict=True):
        write_safetensors(directory / name, content, _values(checkpoint, content, roles), dtype)
    if len(files) > 1:
        located = {entry.name: name for name, content in zip(names, files, strict=True) for entry in content}
        total = sum(entry.size(dtype) for entry in entries)
        _write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": located})
    _write_json(directory / CONFIG_FILE, configuration(checkpoint.architecture, dtype, eos))


def configuration(a: LlamaArchitecture, dtype: str, eos: int | None = None) -> dict[str, Any]:
    """What config.json says, in the keys that transformers 4 and 5 both read."""
    kind: dict[str, Any] = (
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
        if a.qkv_bias
        else {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
        }
    )
    return kind | {
        "num_hidden_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.ffn_hidden_size,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.num_query_groups,
        "head_dim": a.kv_channels,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "max_position_embeddings": a.max_position_embeddings,
        "rope_theta": a.rotary_base,
        "rope_scaling": _rope_scaling(a),
        "rms_norm_eps": a.norm_epsilon,
        "vocab_size": a.vocab_size,
        "tie_word_embeddings": a.tied,
        "torch_dtype": TORCH_NAMES[dtype],
        "bos_token_id": None,
        "eos_token_id": eos,
    }


def _rope_scaling(a: LlamaArchitecture) -> dict[str, Any] | None:
    if a.rope_scaling_factor is not None:
        return {"rope_type": "llama3", "factor": a.rope_scaling_factor, **LLAMA3_SCALING}
    if a.position_divisor is not None:
        return {"rope_type": "linear", "factor": a.position_divisor}
    return None


def _roles(a: LlamaArchitecture) -> Iterator[Role]:
    yield "embedding", None
    for layer in range(a.num_layers):
        yield from ((role, layer) for role in layer_roles(a))
    yield "final_norm", None
    if not a.tied:
        yield "head", None


def _values(checkpoint: LlamaCheckpoint, entries: list[Entry], roles: dict[str, Role]) -> Iterator[Tensor]:
    for entry in entries:
        yield read_half(checkpoint, *roles[entry.name])


def _shard_names(count: int) -> list[str]:
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
