"""A GGUF file of architecture "llama", read one dequantised tensor at a time.

GGUF (the format of llama.cpp) holds header fields ("llama.block_count", ...), the tokenizer and the tensors in one
file, the tensors mostly in block-quantised types. The library `gguf` maps the file and dequantises; only the tensor
that is asked for takes memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from script.data.command_line import InputError
from script.model.architecture import LlamaArchitecture
from script.model.llama_weights import RotaryLayout, layer_roles

if TYPE_CHECKING:
    from torch import Tensor

SUPPORTED_ARCHITECTURE = "llama"
DEFAULT_ROTARY_BASE = 10000.0
ROTARY_FACTORS = "rope_freqs.weight"  # Llama 3.1: what each rotary frequency is divided by
FACTOR_TOLERANCE = 1e-4

MODEL_TENSORS = {"embedding": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
LAYER_TENSORS = {
    "attention_norm": "attn_norm.weight",
    "query": "attn_q.weight",
    "key": "attn_k.weight",
    "value": "attn_v.weight",
    "attention_output": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


class GgufCheckpoint:
    """A LlamaCheckpoint (script/model/llama_weights.py) in a GGUF file.

    Raises:
        InputError: on opening, when the file is broken or another architecture than Llama's.
    """

    rotary_layout: RotaryLayout = "interleaved"

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: no GGUF file, or a broken or truncated one ({error})") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = self._read_architecture()
        self._refuse_foreign_tensors()

    def field(self, name: str, default: Any = None) -> Any:
        """Value of a header field: a number, string, bool or list of these; `default` where there is none."""
        field = self._reader.get_field(name)
        return default if field is None else field.contents()

    def tensor(self, role: str, layer: int | None = None) -> Tensor:
        """See LlamaCheckpoint; float32."""
        import numpy as np
        import torch
        from gguf.quants import dequantize

        name = MODEL_TENSORS[role] if layer is None else f"blk.{layer}.{LAYER_TENSORS[role]}"
        if name not in self._tensors:
            raise InputError(f"{self.path}: the tensor {name} is missing")
        stored = self._tensors[name]
        try:
            values = dequantize(stored.data, stored.tensor_type)
        except NotImplementedError as error:
            raise InputError(f"{self.path}: {name} has a type that can not be read ({error})") from error
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def _read_architecture(self) -> LlamaArchitecture:
        kind = self.field("general.architecture")
        if kind != SUPPORTED_ARCHITECTURE:
            raise InputError(f"{self.path}: architecture {kind!r} is not supported, only {SUPPORTED_ARCHITECTURE!r}")
        if experts := self._hyperparameter("expert_count", 0):
            raise InputError(f"{self.path}: a mixture of {experts} experts is not supported")
        if "token_embd.weight" not in self._tensors:
            raise InputError(f"{self.path}: the tensor token_embd.weight is missing")
        heads, hidden = self._hyperparameter("attention.head_count"), self._hyperparameter("embedding_length")
        head_width = self._hyperparameter("attention.key_length", hidden // heads if heads else 0)
        for name in ("attention.value_length", "rope.dimension_count"):
            if (width := self._hyperparameter(name, head_width)) != head_width:
                raise InputError(f"{self.path}: {name} is {width}, only the head's width {head_width} is supported")
        rotary_base = self._hyperparameter("rope.freq_base", DEFAULT_ROTARY_BASE)
        return LlamaArchitecture(
            num_layers=self._hyperparameter("block_count"),
            hidden_size=hidden,
            ffn_hidden_size=self._hyperparameter("feed_forward_length"),
            num_attention_heads=heads,
            num_query_groups=self._hyperparameter("attention.head_count_kv", heads),
            kv_channels=head_width,
            max_position_embeddings=self._hyperparameter("context_length"),
            rotary_base=rotary_base,
            rope_scaling_factor=self._rope_scaling_factor(head_width, rotary_base),
            norm_epsilon=_shortest_float32(self._hyperparameter("attention.layer_norm_rms_epsilon")),
            vocab_size=int(self._tensors["token_embd.weight"].shape[-1]),
            tied=MODEL_TENSORS["head"] not in self._tensors,
        )

    def _hyperparameter(self, name: str, default: Any = None) -> Any:
        value = self.field(f"{SUPPORTED_ARCHITECTURE}.{name}", default)
        if value is None:
            raise InputError(f"{self.path}: the header field {SUPPORTED_ARCHITECTURE}.{name} is missing")
        if isinstance(value, list):
            raise InputError(f"{self.path}: {name} differs from layer to layer, which is not supported")
        return value

    def _rope_scaling_factor(self, head_width: int, rotary_base: float) -> float | None:
        """Read the stretch of the rotary frequencies, and refuse any that is not Llama 3.1's."""
        import numpy as np

        from script.model.rope_scaling import llama3_divisors

        kind = self.field(f"{SUPPORTED_ARCHITECTURE}.rope.scaling.type", "none")
        if kind != "none":
            raise InputError(f"{self.path}: rotary scaling {kind!r} is not supported, only Llama 3.1's")
        if ROTARY_FACTORS not in self._tensors:
            return None
        divisors = np.asarray(self._tensors[ROTARY_FACTORS].data, dtype=np.float64)
        factor = float(divisors.max())
        expected = llama3_divisors(head_width, rotary_base, factor)
        if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=FACTOR_TOLERANCE):
            raise InputError(f"{self.path}: {ROTARY_FACTORS} is not Llama 3.1's, no other is supported")
        return factor

    def _refuse_foreign_tensors(self) -> None:
        """A tensor that nothing reads (a bias, say) would be left out of the model without a word."""
        known = {ROTARY_FACTORS, *MODEL_TENSORS.values()}
        layers = range(self.architecture.num_layers)
        known |= {f"blk.{layer}.{LAYER_TENSORS[role]}" for layer in layers for role in layer_roles(self.architecture)}
        if foreign := sorted(self._tensors.keys() - known):
            raise InputError(f"{self.path}: {foreign[0]} ({len(foreign)} in all) has no place in a Llama-type model")


def _shortest_float32(value: float) -> float:
    """Return the decimal number that the file's float32 was made from: 1e-05, not 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))
