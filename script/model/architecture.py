"""The shape of a Llama-type model, and the same in Megatron's flags.

Llama-type: decoder only, RMSNorm before attention and MLP, rotary positions over the whole head, grouped queries,
SwiGLU, no biases, output head tied to the embedding or not. Llama 3.1's stretched rotary frequencies are the one
variation that megatron-core knows too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from script.data.command_line import InputError

INIT_METHOD_STD = 0.02  # of weights that are made anew; an imported model has none
LARGEST_VOCAB_MULTIPLE = 128  # Megatron's default padding of the vocabulary

FlagValue = int | float | bool | str

DTYPES: dict[str, dict[str, FlagValue]] = {"bf16": {"bf16": True}, "fp16": {"fp16": True}, "fp32": {}}
"""Compute dtype -> the Megatron flags that choose it."""


@dataclass(frozen=True, kw_only=True)
class LlamaArchitecture:
    """Sizes and constants of a Llama-type model.

    Attributes:
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        ffn_hidden_size: width of the SwiGLU's two inputs, each.
        num_attention_heads: query heads.
        num_query_groups: key and value heads; divides the query heads.
        kv_channels: width of a head; even.
        max_position_embeddings: longest sequence it was made for.
        rotary_base: theta of the rotary positions.
        rope_scaling_factor: Llama 3.1's stretch of the low rotary frequencies; None: not stretched.
        norm_epsilon: of RMSNorm.
        vocab_size: rows of the embedding.
        tied: the output head is the embedding.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    max_position_embeddings: int
    rotary_base: float
    rope_scaling_factor: float | None = None
    norm_epsilon: float
    vocab_size: int
    tied: bool

    def __post_init__(self) -> None:
        """Refuse sizes that no model can have."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("tied", "rope_scaling_factor") and not value > 0:
                raise InputError(f"{field.name} is {value}, it must be above 0")
        if self.num_attention_heads % self.num_query_groups:
            raise InputError(
                f"{self.num_attention_heads} query heads can not be shared by {self.num_query_groups} key/value heads"
            )
        if self.kv_channels % 2:
            raise InputError(f"a head is {self.kv_channels} wide, rotary positions need an even width")

    def flags(self) -> dict[str, FlagValue]:
        """Destinations of Megatron's architecture flags and their values: what model.json holds."""
        flags: dict[str, FlagValue] = {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "ffn_hidden_size": self.ffn_hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "group_query_attention": True,
            "num_query_groups": self.num_query_groups,
            "kv_channels": self.kv_channels,
            "max_position_embeddings": self.max_position_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": self.rotary_base,
            "rotary_interleaved": False,
            "rotary_percent": 1.0,
            "normalization": "RMSNorm",
            "norm_epsilon": self.norm_epsilon,
            "swiglu": True,
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": not self.tied,
            "vocab_size": self.vocab_size,
            "make_vocab_size_divisible_by": self._vocab_multiple(),
            "init_method_std": INIT_METHOD_STD,
        }
        if self.rope_scaling_factor is not None:
            flags |= {"use_rope_scaling": True, "rope_scaling_factor": self.rope_scaling_factor}
        return flags

    def _vocab_multiple(self) -> int:
        """Return the largest padding that adds no row: a row of zeros would still take part in the softmax."""
        multiple = LARGEST_VOCAB_MULTIPLE
        while self.vocab_size % multiple:
            multiple //= 2
        return multiple
