"""Tensors of a Llama-type checkpoint, and the parameters of megatron-core's GPTModel (local layer spec) made of them.

| Llama tensor | Megatron parameter |
|---|---|
| embedding | embedding.word_embeddings.weight |
| attention_norm | decoder.layers.N.input_layernorm.weight |
| query, key, value | decoder.layers.N.self_attention.linear_qkv.weight (and .bias, where the model has one) |
| attention_output | decoder.layers.N.self_attention.linear_proj.weight |
| mlp_norm | decoder.layers.N.pre_mlp_layernorm.weight |
| gate, up | decoder.layers.N.mlp.linear_fc1.weight: gate's rows, then up's |
| down | decoder.layers.N.mlp.linear_fc2.weight |
| final_norm | decoder.final_layernorm.weight |
| head | output_layer.weight; none if tied |

linear_qkv has the rows of each key/value head together: its query heads, its key head, its value head.

Rotary positions turn pairs of channels. Hugging Face checkpoints and Megatron pair channel i with i + d/2 ("half");
GGUF files of architecture "llama" pair 2i with 2i + 1 ("interleaved"), their query and key rows being permuted to fit.
Both compute the same attention; read in the wrong layout SmolLM2 still runs, with a loss of 5.6 instead of 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from script.data.command_line import InputError
from script.model.architecture import LlamaArchitecture

if TYPE_CHECKING:
    from torch import Tensor, nn

RotaryLayout: TypeAlias = Literal["half", "interleaved"]

MODEL_ROLES = ("embedding", "final_norm", "head")
LAYER_ROLES = (
    "attention_norm", "query", "key", "value", "attention_output", "mlp_norm", "gate", "up", "down",
)  # fmt: skip
QUERY_KEY_VALUE = ("query", "key", "value")
BIAS_ROLES = ("query_bias", "key_bias", "value_bias")  # of every layer, where the architecture has qkv_bias


class LlamaCheckpoint(Protocol):
    """A checkpoint that can be read one tensor at a time.

    Attributes:
        architecture: its sizes.
        rotary_layout: which channels of its queries and keys are paired.
    """

    architecture: LlamaArchitecture
    rotary_layout: RotaryLayout

    def tensor(self, role: str, layer: int | None = None) -> Tensor:
        """Read a tensor of MODEL_ROLES, or of `layer_roles` and a layer; its shape is that of tensor_shapes."""
        ...


def layer_roles(architecture: LlamaArchitecture) -> tuple[str, ...]:
    """The roles that each layer of a model has a tensor for."""
    return LAYER_ROLES + (BIAS_ROLES if architecture.qkv_bias else ())


def tensor_shapes(a: LlamaArchitecture) -> dict[str, tuple[int, ...]]:
    """Shape of the tensor of each role: [out, in], of norms [hidden], of biases [out]."""
    query_rows, key_rows = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
    return {
        "embedding": (a.vocab_size, a.hidden_size),
        "final_norm": (a.hidden_size,),
        "head": (a.vocab_size, a.hidden_size),
        "attention_norm": (a.hidden_size,),
        "query": (query_rows, a.hidden_size),
        "key": (key_rows, a.hidden_size),
        "value": (key_rows, a.hidden_size),
        "query_bias": (query_rows,),
        "key_bias": (key_rows,),
        "value_bias": (key_rows,),
        "attention_output": (a.hidden_size, query_rows),
        "mlp_norm": (a.hidden_size,),
        "gate": (a.ffn_hidden_size, a.hidden_size),
        "up": (a.ffn_hidden_size, a.hidden_size),
        "down": (a.hidden_size, a.ffn_hidden_size),
    }


def half_layout(w_NK: Tensor, heads: int) -> Tensor:
    """Reorder query or key rows from interleaved to half rotary layout: in each head the even rows, then the odd."""
    rows, columns = w_NK.shape
    return w_NK.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def group_rows(query_NK: Tensor, key_NK: Tensor, value_NK: Tensor, groups: int) -> Tensor:
    """Concatenate query, key and value rows as linear_qkv wants them, key/value head by key/value head."""
    import torch

    columns = query_NK.shape[1:]  # none of a bias
    parts = [w.reshape(groups, -1, *columns) for w in (query_NK, key_NK, value_NK)]
    return torch.cat(parts, dim=1).reshape(-1, *columns)


def ungroup_rows(qkv_NK: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Take query, key and value rows out of linear_qkv: the inverse of `group_rows`."""
    columns = qkv_NK.shape[1:]
    width = qkv_NK.shape[0] // (heads + 2 * groups)
    grouped = qkv_NK.reshape(groups, -1, *columns)
    query, key, value = grouped.split([heads // groups * width, width, width], dim=1)
    return query.reshape(-1, *columns), key.reshape(-1, *columns), value.reshape(-1, *columns)


def megatron_parameters(checkpoint: LlamaCheckpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each GPTModel parameter, in the checkpoint's precision, one at a time.

    Raises:
        InputError: a tensor is missing or has another shape than the architecture says.
    """
    import torch

    layer_parameters: dict[str, Callable[[int], Tensor]] = {
        "input_layernorm.weight": lambda layer: read(checkpoint, "attention_norm", layer),
        "self_attention.linear_qkv.weight": lambda layer: _query_key_value(checkpoint, layer),
        "self_attention.linear_proj.weight": lambda layer: read(checkpoint, "attention_output", layer),
        "pre_mlp_layernorm.weight": lambda layer: read(checkpoint, "mlp_norm", layer),
        "mlp.linear_fc1.weight": lambda layer: torch.cat(
            [read(checkpoint, "gate", layer), read(checkpoint, "up", layer)]
        ),
        "mlp.linear_fc2.weight": lambda layer: read(checkpoint, "down", layer),
    }
    if checkpoint.architecture.qkv_bias:
        layer_parameters["self_attention.linear_qkv.bias"] = lambda layer: _query_key_value(
            checkpoint, layer, BIAS_ROLES
        )
    yield "embedding.word_embeddings.weight", read(checkpoint, "embedding")
    for layer in range(checkpoint.architecture.num_layers):
        for parameter, value in layer_parameters.items():
            yield f"decoder.layers.{layer}.{parameter}", value(layer)
    yield "decoder.final_layernorm.weight", read(checkpoint, "final_norm")
    if not checkpoint.architecture.tied:
        yield "output_layer.weight", read(checkpoint, "head")


def read(checkpoint: LlamaCheckpoint, role: str, layer: int | None = None) -> Tensor:
    """Read a tensor and check its shape.

    Raises:
        InputError: it is missing or has another shape than the architecture says.
    """
    tensor, expected = checkpoint.tensor(role, layer), tensor_shapes(checkpoint.architecture)[role]
    if tuple(tensor.shape) != expected:
        where = "" if layer is None else f" of layer {layer}"
        raise InputError(f"{role}{where} has the shape {list(tensor.shape)}, {list(expected)} is expected")
    return tensor


def read_half(checkpoint: LlamaCheckpoint, role: str, layer: int | None = None) -> Tensor:
    """Read a tensor as `read` does, queries and keys in half rotary layout."""
    tensor, a = read(checkpoint, role, layer), checkpoint.architecture
    if checkpoint.rotary_layout == "half" or role not in ("query", "key"):
        return tensor
    return half_layout(tensor, a.num_attention_heads if role == "query" else a.num_query_groups)


def _query_key_value(checkpoint: LlamaCheckpoint, layer: int, roles: Sequence[str] = QUERY_KEY_VALUE) -> Tensor:
    """Read a layer's linear_qkv, in half rotary layout."""
    query, key, value = (read_half(checkpoint, role, layer) for role in roles)
    return group_rows(query, key, value, checkpoint.architecture.num_query_groups)


VOCABULARY_PARAMETERS = ("embedding.word_embeddings.weight", "output_layer.weight")


def load_into(model: nn.Module, checkpoint: LlamaCheckpoint) -> None:
    """Copy a checkpoint into a bare GPTModel (before Float16Module, DDP and optimizer), in the model's dtype.

    Rows that pad the vocabulary become zero.

    Raises:
        InputError: names or shapes of the two do not agree.
    """
    import torch

    waiting = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in megatron_parameters(checkpoint):
            parameter = waiting.pop(name, None)
            if parameter is None:
                raise InputError(f"the model has no parameter {name}")
            target: Tensor = parameter
            if name in VOCABULARY_PARAMETERS:
                target[value.shape[0] :].zero_()
                target = target[: value.shape[0]]
            if target.shape != value.shape:
                raise InputError(f"{name} is {list(target.shape)} in the model, {list(value.shape)} in the checkpoint")
            target.copy_(value)
    if waiting:
        raise InputError(f"the checkpoint has nothing for the model's parameter {next(iter(waiting))}")
