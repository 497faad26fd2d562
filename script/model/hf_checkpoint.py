"""A Hugging Face directory of a Llama-type model: config.json and *.safetensors, read one tensor at a time.

Read are models of the types Llama and Mistral, and of Qwen2, which is Llama with biases on queries, keys and values.
Pickled weights (*.bin, *.pt) are not read: opening one runs what is written in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.training.data.tokenizer import CONFIG_FILE as TOKENIZER_CONFIG_FILE
from megatron.training.data.tokenizer import TOKENIZER_FILE
from script.data.command_line import InputError
from script.data.json_file import read_json_object
from script.model import rope_scaling
from script.model.architecture import LlamaArchitecture
from script.model.llama_weights import RotaryLayout, layer_roles

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SAFETENSORS_SUFFIX = ".safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer.model",
    TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
SUPPORTED_TYPES = ("llama", "mistral", "qwen2")
WITH_QKV_BIAS = ("qwen2",)
DEFAULT_ROTARY_BASE = 10000.0
DEFAULT_NORM_EPSILON = 1e-6

# Options of the configuration that change what the model computes, and the values that leave it a plain Llama.
REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "quantization_config": (None,),
}
FULL_ATTENTION = "full_attention"
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
    "query_bias": "self_attn.q_proj.bias",
    "key_bias": "self_attn.k_proj.bias",
    "value_bias": "self_attn.v_proj.bias",
}


def tensor_name(role: str, layer: int | None = None) -> str:
    """Name of the tensor of a role (script/model/llama_weights.py)."""
    return MODEL_TENSORS[role] if layer is None else f"model.layers.{layer}.{LAYER_TENSORS[role]}"


class HuggingFaceCheckpoint:
    """A LlamaCheckpoint (script/model/llama_weights.py) in a directory.

    Args:
        source: the directory, or one .safetensors file in it that holds the whole model.

    Raises:
        InputError: on opening, when a file is missing or broken, or the model is not of Llama's type.
    """

    rotary_layout: RotaryLayout = "half"

    def __init__(self, source: Path) -> None:
        self._weights = None if source.is_dir() else source
        self.directory = source if source.is_dir() else source.parent
        self._config = read_json_object(self.directory / CONFIG_FILE)
        self.architecture = self._read_architecture()
        self._files = self._locate_tensors()
        self._refuse_foreign_tensors()

    def tensor(self, role: str, layer: int | None = None) -> Tensor:
        """See LlamaCheckpoint; in the dtype of the file."""
        from safetensors import SafetensorError, safe_open

        name = tensor_name(role, layer)
        if name not in self._files:
            raise InputError(f"{self.directory}: the tensor {name} is missing")
        try:
            with safe_open(self._files[name], framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise InputError(f"{self._files[name]}: {name} can not be read ({error})") from error
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise InputError(f"{self._files[name]}: {name} is {tensor.dtype}; fp32, fp16 and bf16 are read")
        return tensor

    def _read_architecture(self) -> LlamaArchitecture:
        kind = self._config.get("model_type")
        if kind not in SUPPORTED_TYPES:
            raise InputError(
                f"{self.directory}: model type {kind!r} is not supported, only {' and '.join(SUPPORTED_TYPES)}"
            )
        for option, allowed in REQUIRED_VALUES.items():
            if self._config.get(option) not in allowed:
                raise InputError(f"{self.directory}: {option} = {self._config[option]!r} is not supported")
        self._refuse_sliding_windows(kind)
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
            **self._rope_scaling(rotary),
            norm_epsilon=float(self._number("rms_norm_eps", DEFAULT_NORM_EPSILON)),
            vocab_size=self._number("vocab_size"),
            tied=bool(self._config.get("tie_word_embeddings", False)),
            qkv_bias=kind in WITH_QKV_BIAS,
        )

    def _refuse_sliding_windows(self, kind: Any) -> None:
        """Mistral slides by a number, Qwen2 by a switch, newer configurations by a kind for each layer."""
        window = self._config.get("sliding_window")
        if kind not in WITH_QKV_BIAS and window is not None:
            raise InputError(f"{self.directory}: sliding_window = {window!r} is not supported")
        for layer_type in self._config.get("layer_types") or ():
            if layer_type != FULL_ATTENTION:
                raise InputError(f"{self.directory}: layer_types with {layer_type!r} is not supported")

    def _number(self, name: str, default: float | None = None) -> Any:
        value = self._config.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float):
            raise InputError(f"{self.directory / CONFIG_FILE}: {name} is {value!r}, a number is expected")
        return value

    def _rotary_parameters(self) -> dict[str, Any]:
        """Old configurations keep rope_theta and rope_scaling apart, newer ones have rope_parameters for both."""
        return self._config.get("rope_parameters") or self._config.get("rope_scaling") or {}

    def _rope_scaling(self, rotary: dict[str, Any]) -> dict[str, float]:
        """Return the fields of LlamaArchitecture that say how rotary positions are stretched."""
        kind = rotary.get("rope_type", rotary.get("type", "default"))
        if kind == "default":
            return {}
        factor = rotary.get("factor")
        if isinstance(factor, int | float):
            if kind == "linear":
                return {"position_divisor": float(factor)}
            if kind == "llama3" and all(rotary.get(name) == value for name, value in LLAMA3_SCALING.items()):
                return {"rope_scaling_factor": float(factor)}
        raise InputError(
            f"{self.directory}: rotary scaling {rotary} is not supported, only linear, and llama3 with {LLAMA3_SCALING}"
        )

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
        if self._weights is not None:
            return [self._weights]
        if not (self.directory / INDEX_FILE).is_file():
            single = self.directory / SINGLE_FILE
            paths = [single] if single.is_file() else sorted(self.directory.glob(f"*{SAFETENSORS_SUFFIX}"))
            if not paths:
                raise InputError(self._no_weights())
            return paths
        names = set(read_json_object(self.directory / INDEX_FILE).get("weight_map", {}).values())
        if strange := sorted(name for name in names if Path(name).name != name):
            raise InputError(f"{self.directory / INDEX_FILE}: {strange[0]} is not the name of a file beside it")
        return [self.directory / name for name in sorted(names)]

    def _no_weights(self) -> str:
        pickled = sorted(path.name for path in self.directory.iterdir() if path.suffix in PICKLED)
        if not pickled:
            return f"{self.directory}: there is no *{SAFETENSORS_SUFFIX} in it"
        return f"{self.directory}: {pickled[0]} is pickled, which is never read here; save it as safetensors"

    def _refuse_foreign_tensors(self) -> None:
        """A tensor that nothing reads (a bias, say) would be left out of the model without a word."""
        known = set(MODEL_TENSORS.values())
        layers = range(self.architecture.num_layers)
        known |= {tensor_name(role, layer) for layer in layers for role in layer_roles(self.architecture)}
        foreign = sorted(name for name in self._files.keys() - known if not name.endswith(DERIVED_SUFFIX))
        if foreign:
            raise InputError(
                f"{self.directory}: {foreign[0]} ({len(foreign)} in all) has no place in a Llama-type model"
            )
