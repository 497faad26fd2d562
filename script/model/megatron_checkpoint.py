"""A Megatron checkpoint of a Llama-type model, read one tensor at a time.

megatron-core's torch_dist format keeps every parameter under one name with its global shape, in pieces of whatever
layout wrote it; so tensor and pipeline parallel sizes do not show here, and the optimizer's state is simply not read.
Layers are kept either stacked ("decoder.layers.mlp..." [layers, out, in]) or apart ("decoder.layers.3.mlp..."). Of a
stack only the layer that is asked for is read: PyTorch's distributed checkpoint reader finds the pieces it lies in.

The norm before a linear layer goes by the name that TransformerEngine gives it, which is part of that layer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.training.checkpoint import checkpoint_directory
from megatron.training.checkpoint.architecture import FILE_NAME, read_architecture
from megatron.training.checkpoint.checkpoint_directory import RELEASE
from script.data.command_line import InputError
from script.model.architecture import LlamaArchitecture
from script.model.llama_weights import BIAS_ROLES, QUERY_KEY_VALUE, RotaryLayout, layer_roles, ungroup_rows

if TYPE_CHECKING:
    import torch

    from script.model.torch_dist import TorchDistReader

LATEST_ITERATION = "latest"
STACKED_LAYERS, LAYER = "decoder.layers.", "decoder.layers.{layer}."
INDEX_FILE = ".metadata"
NOT_THE_MODEL = ("optimizer.", "rng_state", "rerun_state_machine_state")
NOT_A_WEIGHT = "_extra_state"

MODEL_KEYS = {
    "embedding": "embedding.word_embeddings.weight",
    "final_norm": "decoder.final_layernorm.weight",
    "head": "output_layer.weight",
}
LAYER_KEYS = {
    "attention_norm": "self_attention.linear_qkv.layer_norm_weight",
    **dict.fromkeys(QUERY_KEY_VALUE, "self_attention.linear_qkv.weight"),
    **dict.fromkeys(BIAS_ROLES, "self_attention.linear_qkv.bias"),
    "attention_output": "self_attention.linear_proj.weight",
    "mlp_norm": "mlp.linear_fc1.layer_norm_weight",
    **dict.fromkeys(("gate", "up"), "mlp.linear_fc1.weight"),
    "down": "mlp.linear_fc2.weight",
}
NORMS = ("attention_norm", "mlp_norm", "final_norm")
PADDED = ("embedding", "head")

# Model flags that change what the model computes, and the values with which it is of Llama's type.
REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0,),
    "normalization": ("RMSNorm",),
    "qk_layernorm": (False,),
    "swiglu": (True,),
    "squared_relu": (False,),
    "add_bias_linear": (False,),
    "num_experts": (None,),
    "multi_latent_attention": (False,),
}
# Those that are read below, and those that the weights do not depend on. Of all others only "off" is understood.
READ_HERE = frozenset({
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention", "num_query_groups",
    "kv_channels", "max_position_embeddings", "rotary_base", "rotary_interleaved", "use_rope_scaling",
    "rope_scaling_factor", "rotary_seq_len_interpolation_factor", "norm_epsilon", "layernorm_zero_centered_gamma",
    "add_qkv_bias", "untie_embeddings_and_output_weights", "vocab_size",
})  # fmt: skip
OF_EXPERTS = "moe_"  # of no meaning in a model without, which num_experts has been seen to be
WITHOUT_MEANING = frozenset({"make_vocab_size_divisible_by", "init_method_std"})


class MegatronCheckpoint:
    """A LlamaCheckpoint (script/model/llama_weights.py) in a checkpoint directory of the trainer.

    Args:
        directory: what --save or import_checkpoint wrote.
        iteration: "latest", "release", or a number of iterations.

    Raises:
        InputError: on opening, when there is no such checkpoint, or the model is not of Llama's type.
    """

    def __init__(self, directory: Path, iteration: str = LATEST_ITERATION) -> None:
        self.directory = directory
        self.path = _find(directory, iteration)
        flags = read_architecture(directory)
        if flags is None:
            raise InputError(
                f"{directory / FILE_NAME} is missing: nothing says what model this is. Checkpoints of Megatron-LM's "
                "own trainer have none and are not exported as they are; docs/checkpoints.md says how to write one"
            )
        self.architecture = architecture_of(flags, str(directory))
        self.rotary_layout: RotaryLayout = "interleaved" if flags.get("rotary_interleaved") else "half"
        self._norm_offset = 1.0 if flags.get("layernorm_zero_centered_gamma") else 0.0
        self._reader = _open(self.path)
        self._refuse_foreign_tensors()
        self._refuse_more_layers()
        self._last: tuple[tuple[str, int | None], torch.Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self._reader.tensors[MODEL_KEYS["embedding"]].dtype

    def tensor(self, role: str, layer: int | None = None) -> torch.Tensor:
        """See LlamaCheckpoint; in the dtype of the checkpoint, padding of the vocabulary cut off."""
        a = self.architecture
        stored = self._stored(MODEL_KEYS[role] if layer is None else LAYER_KEYS[role], layer)
        for fused in (QUERY_KEY_VALUE, BIAS_ROLES):
            if role in fused:
                self._require_rows(
                    stored, (a.num_attention_heads + 2 * a.num_query_groups) * a.kv_channels, role, layer
                )
                return ungroup_rows(stored, a.num_attention_heads, a.num_query_groups)[fused.index(role)]
        parts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "gate": lambda w_NK: w_NK[: a.ffn_hidden_size],
            "up": lambda w_NK: w_NK[a.ffn_hidden_size :],
            **dict.fromkeys(PADDED, lambda w_NK: w_NK[: a.vocab_size]),
            **dict.fromkeys(NORMS, lambda w: (w.float() + self._norm_offset).to(w.dtype) if self._norm_offset else w),
        }
        return parts.get(role, lambda w_NK: w_NK)(stored)

    def _stored(self, key: str, layer: int | None) -> torch.Tensor:
        """Read what the checkpoint keeps; the last thing read is kept, since several roles may be parts of it."""
        if self._last is None or self._last[0] != (key, layer):
            self._last = None  # frees it first
            self._last = (key, layer), self._read(key, layer)
        return self._last[1]

    def _read(self, key: str, layer: int | None) -> torch.Tensor:
        tensors = self._reader.tensors
        apart = key if layer is None else LAYER.format(layer=layer) + key
        stacked = STACKED_LAYERS + key
        if apart in tensors:
            name, row = apart, None
        elif layer is not None and stacked in tensors and layer < tensors[stacked].shape[0]:
            name, row = stacked, layer
        else:
            raise InputError(f"{self.path}: the tensor {apart} is missing")
        try:
            return self._reader.read(name, row)
        except (OSError, RuntimeError, ValueError, EOFError) as error:
            raise InputError(f"{self.path}: {name} can not be read ({_first_line(error)})") from error

    def _refuse_foreign_tensors(self) -> None:
        """A tensor that nothing reads (of an expert, say) would be left out of the model without a word."""
        layers = [LAYER.format(layer=layer) for layer in range(self.architecture.num_layers)]
        known = set(MODEL_KEYS.values())
        known |= {
            prefix + LAYER_KEYS[role] for prefix in (STACKED_LAYERS, *layers) for role in layer_roles(self.architecture)
        }
        foreign = sorted(
            name
            for name in self._reader.tensors.keys() - known
            if not name.startswith(NOT_THE_MODEL) and NOT_A_WEIGHT not in name
        )
        if foreign:
            raise InputError(f"{self.path}: {foreign[0]} ({len(foreign)} in all) has no place in a Llama-type model")

    def _refuse_more_layers(self) -> None:
        """The layers of a stack behind the last one that model.json knows would be left out without a word."""
        layers = self.architecture.num_layers
        for name, stored in self._reader.tensors.items():
            if name.removeprefix(STACKED_LAYERS) in LAYER_KEYS.values() and stored.shape[0] > layers:
                raise InputError(f"{self.path}: {name} holds {stored.shape[0]} layers, {FILE_NAME} says {layers}")

    def _require_rows(self, stored: torch.Tensor, rows: int, role: str, layer: int | None) -> None:
        if stored.shape[0] != rows:
            raise InputError(
                f"{self.path}: {LAYER.format(layer=layer)}{LAYER_KEYS[role]} has {stored.shape[0]} rows, the heads, "
                f"query groups and kv_channels of {FILE_NAME} make {rows}"
            )


def _find(directory: Path, iteration: str) -> Path:
    """The folder of a checkpoint."""
    if iteration == LATEST_ITERATION:
        found = checkpoint_directory.latest(directory)
        if found is None:
            raise InputError(f"{directory} holds no checkpoint of pretrain_gpt.py or import_checkpoint")
        return found.path
    if iteration != RELEASE and not iteration.isdecimal():
        raise InputError(f"--iteration {iteration}: give a number of iterations, {RELEASE} or {LATEST_ITERATION}")
    path = checkpoint_directory.path_of(directory, iteration)
    if not path.is_dir():
        raise InputError(f"{path} is not there")
    return path


def _open(folder: Path) -> TorchDistReader:
    from script.model.torch_dist import TorchDistReader

    if not (folder / INDEX_FILE).is_file():
        raise InputError(f"{folder} is no complete torch_dist checkpoint: {INDEX_FILE} is missing")
    try:
        return TorchDistReader(folder)
    except Exception as error:  # the index is a pickle: a broken one raises anything
        raise InputError(f"{folder / INDEX_FILE} can not be read ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def architecture_of(flags: dict[str, Any], where: str) -> LlamaArchitecture:
    """The sizes that model flags name.

    Args:
        flags: what model.json holds.
        where: begins complaints.

    Raises:
        InputError: the flags are not those of a Llama-type model, or lack one.
    """
    for name, allowed in REQUIRED_VALUES.items():
        if flags.get(name, allowed[0]) not in allowed:
            raise InputError(f"{where}: {name} = {flags[name]!r} has no counterpart in a Llama-type model")
    known = READ_HERE | WITHOUT_MEANING | REQUIRED_VALUES.keys()
    for name, value in flags.items():
        if name not in known and not name.startswith(OF_EXPERTS) and value not in (None, False):
            raise InputError(f"{where}: {name} = {value!r} is not known to have a counterpart in a Llama-type model")
    if flags.get("rotary_interleaved") and flags.get("add_qkv_bias"):
        raise InputError(f"{where}: rotary_interleaved with add_qkv_bias is not supported")
    try:
        heads = flags["num_attention_heads"]
        return LlamaArchitecture(
            num_layers=flags["num_layers"],
            hidden_size=flags["hidden_size"],
            ffn_hidden_size=flags["ffn_hidden_size"],
            num_attention_heads=heads,
            num_query_groups=flags["num_query_groups"] if flags["group_query_attention"] else heads,
            kv_channels=flags["kv_channels"] or flags["hidden_size"] // heads,
            max_position_embeddings=flags["max_position_embeddings"],
            rotary_base=float(flags["rotary_base"]),
            rope_scaling_factor=flags["rope_scaling_factor"] if flags.get("use_rope_scaling") else None,
            position_divisor=flags.get("rotary_seq_len_interpolation_factor"),
            norm_epsilon=flags["norm_epsilon"],
            vocab_size=flags["vocab_size"],
            tied=not flags["untie_embeddings_and_output_weights"],
            qkv_bias=bool(flags.get("add_qkv_bias")),
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{where}: {FILE_NAME} does not say what the model is: {error}") from error
