"""The shape of a Llama-type model, and the same in Megatron's flags.

Llama-type: decoder only, RMSNorm before attention and MLP, rotary positions over the whole head, grouped queries,
SwiGLU, output head tied to the embedding or not, no biases but for those that Qwen2 has on queries, keys and values.
Rotary frequencies may be stretched as in Llama 3.1, or positions divided by a number ("linear").
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
        position_divisor: what positions are divided by before they turn anything; None: they are not.
        norm_epsilon: of RMSNorm.
        vocab_size: rows of the embedding.
        tied: the output head is the embedding.
        qkv_bias: queries, keys and values have a bias.
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
    position_divisor: float | None = None
    norm_epsilon: float
    vocab_size: int
    tied: bool
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes that no model can have."""
        for field in fields(self):
            value = getattr(self, field.name)
            may_lack = field.default is None
            if not isinstance(value, bool) and not (may_lack and value is None) and not (value and value > 0):
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
            "add_qkv_bias": self.qkv_bias,
            "untie_embeddings_and_output_weights": not self.tied,
            "vocab_size": self.vocab_size,
            "make_vocab_size_divisible_by": self._vocab_multiple(),
            "init_method_std": INIT_METHOD_STD,
        }
        if self.rope_scaling_factor is not None:
            flags |= {"use_rope_scaling": True, "rope_scaling_factor": self.rope_scaling_factor}
        if self.position_divisor is not None:
            flags["rotary_seq_len_interpolation_factor"] = self.position_divisor
        return flags

    def _vocab_multiple(self) -> int:
        """Return the largest padding that adds no row: a row of zeros would still take part in the softmax."""
        multiple = LARGEST_VOCAB_MULTIPLE
        while self.vocab_size % multiple:
            multiple //= 2
        return multiple
