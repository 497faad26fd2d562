"""A Hugging Face directory of a Llama-type model: config.json and *.safetensors, read one tensor at a time."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from script.data.command_line import InputError
from script.model import rope_scaling
from script.model.architecture import LlamaArchitecture
from script.model.llama_weights import RotaryLayout

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SUPPORTED_TYPES = ("llama", "mistral")
DEFAULT_ROTARY_BASE = 10000.0
DEFAULT_NORM_EPSILON = 1e-6

# Options of the configuration that change what the model computes, and the values that leave it a plain Llama.
REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "sliding_window": (None,),
    "quantization_config": (None,),
}
LLAMA3_SCALING = {
    "low_freq_factor": rope_scaling.LOW_FREQUENCY_FACTOR,
    "high_freq_factor": rope_scaling.HIGH_FREQUENCY_FACTOR,
    "original_max_position_embeddings": rope_scaling.ORIGINAL_CONTEXT,
}
DERIVED_SUFFIX = "rotary_emb.inv_freq"  # old files keep what follows from the rotary base

MODEL_TENSORS = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
LAYER_TENSORS = {
    "attention_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "attention_output": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


class HuggingFaceCheckpoint:
    """A LlamaCheckpoint (script/model/llama_weights.py) in a directory.

    Raises:
        InputError: on opening, when a file is missing or broken, or the model is not of Llama's type.
    """

    rotary_layout: RotaryLayout = "half"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._config = _read_json(directory / CONFIG_FILE)
        self.architecture = self._read_architecture()
        self._files = self._locate_tensors()
        self._refuse_foreign_tensors()

    def tensor(self, role: str, layer: int | None = None) -> Tensor:
        """See LlamaCheckpoint; in the dtype of the file."""
        from safetensors import SafetensorError, safe_open

        name = MODEL_TENSORS[role] if layer is None else f"model.layers.{layer}.{LAYER_TENSORS[role]}"
        if name not in self._files:
            raise InputError(f"{self.directory}: the tensor {name} is missing")
        try:
            with safe_open(self._files[name], framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except SafetensorError as error:
            raise InputError(f"{self._files[name]}: {name} can not be read ({error})") from error

    def _read_architecture(self) -> LlamaArchitecture:
        kind = self._config.get("model_type")
        if kind not in SUPPORTED_TYPES:
            raise InputError(
                f"{self.directory}: model type {kind!r} is not supported, only {' and '.join(SUPPORTED_TYPES)}"
            )
        for option, allowed in REQUIRED_VALUES.items():
            if self._config.get(option) not in allowed:
                raise InputError(f"{self.directory}: {option} = {self._config[option]!r} is not supported")
        heads, hidden = self._number("num_attention_heads"), self._number("hidden_size")
        rotary = self._rotary_parameters()
        return LlamaArchitecture(
            num_layers=self._number("num_hidden_layers"),
            hidden_size=hidden,
            ffn_hidden_size=self._number("intermediate_size"),
            num_attention_heads=heads,
            num_query_groups=self._number("num_key_value_heads", heads),
            kv_channels=self._number("head_dim", hidden // heads if heads else 0),
            max_position_embeddings=self._number("max_position_embeddings"),
            rotary_base=float(rotary.get("rope_theta", self._number("rope_theta", DEFAULT_ROTARY_BASE))),
            rope_scaling_factor=self._rope_scaling_factor(rotary),
            norm_epsilon=float(self._number("rms_norm_eps", DEFAULT_NORM_EPSILON)),
            vocab_size=self._number("vocab_size"),
            tied=bool(self._config.get("tie_word_embeddings", False)),
        )

    def _number(self, name: str, default: float | None = None) -> Any:
        value = self._config.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float):
            raise InputError(f"{self.directory / CONFIG_FILE}: {name} is {value!r}, a number is expected")
        return value

    def _rotary_parameters(self) -> dict[str, Any]:
        """Old configurations keep rope_theta and rope_scaling apart, newer ones have rope_parameters for both."""
        return self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}

    def _rope_scaling_factor(self, rotary: dict[str, Any]) -> float | None:
        kind = rotary.get("rope_type", rotary.get("type", "default"))
        if kind == "default":
            return None
        if kind != "llama3" or any(rotary.get(name) != value for name, value in LLAMA3_SCALING.items()):
            raise InputError(
                f"{self.directory}: rotary scaling {rotary} is not supported, only llama3 {LLAMA3_SCALING}"
            )
        return float(rotary["factor"])

    def _locate_tensors(self) -> dict[str, Path]:
        """Return the file of every tensor."""
        from safetensors import SafetensorError, safe_open

        located: dict[str, Path] = {}
        for path in self._weight_files():
            try:
                with safe_open(path, framework="pt") as file:
                    located |= dict.fromkeys(file.keys(), path)
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path}: no safetensors file, or a broken or truncated one ({error})") from error
        return located

    def _weight_files(self) -> list[Path]:
        if not (self.directory / INDEX_FILE).is_file():
            paths = sorted(self.directory.glob("*.safetensors"))
            if not paths:
                raise InputError(f"{self.directory}: there is no *.safetensors in it")
            return paths
        names = set(_read_json(self.directory / INDEX_FILE).get("weight_map", {}).values())
        if strange := sorted(name for name in names if Path(name).name != name):
            raise InputError(f"{self.directory / INDEX_FILE}: {strange[0]} is not the name of a file beside it")
        return [self.directory / name for name in sorted(names)]

    def _refuse_foreign_tensors(self) -> None:
        """A tensor that nothing reads (a bias, say) would be left out of the model without a word."""
        known = set(MODEL_TENSORS.values())
        layers = range(self.architecture.num_layers)
        known |= {f"model.layers.{layer}.{name}" for layer in layers for name in LAYER_TENSORS.values()}
        foreign = sorted(name for name in self._files.keys() - known if not name.endswith(DERIVED_SUFFIX))
        if foreign:
            raise InputError(
                f"{self.directory}: {foreign[0]} ({len(foreign)} in all) has no place in a Llama-type model"
            )


def _read_json(path: Path) -> dict[str, Any]:
    content: Any = None
    if not path.is_file():
        raise InputError(f"no such file: {path}")
    with suppress(ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise InputError(f"{path}: no JSON object")
    return content
