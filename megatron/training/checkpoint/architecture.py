"""The model flags that travel with a checkpoint: `model.json`, a flat object {flag destination: value}.

A checkpoint without them can only be loaded by someone who remembers the right flags, and two of them (the rotary base,
the tied head) give a plausible and wrong loss when they are wrong. So every checkpoint directory carries them;
`--use-checkpoint-args` reads them, and saving beside a checkpoint of another architecture is refused.

They are the flags that decide which weights there are and what is computed from them. In what precision, how they are
trained (dropout, jitter, losses of the router) and how tokens travel is a matter of each run.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from megatron.training.failure import UsageError

FILE_NAME = "model.json"
ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "max_position_embeddings",
    "position_embedding_type",
    "rotary_base",
    "rotary_interleaved",
    "rotary_percent",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "normalization",
    "norm_epsilon",
    "layernorm_zero_centered_gamma",
    "qk_layernorm",
    "swiglu",
    "squared_relu",
    "add_bias_linear",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_enable_expert_bias",
    "moe_router_load_balancing_type",
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
    "vocab_size",
    "make_vocab_size_divisible_by",
    "init_method_std",
)
# Taken over, but another value is not another model.
_NOT_PART_OF_THE_WEIGHTS = {
    "init_method_std",
    "max_position_embeddings",
    "make_vocab_size_divisible_by",
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
}
_BALANCING = "moe_router_load_balancing_type"
_SINKHORN, _BY_SCORE = "sinkhorn", "none"  # of the ways to balance, the one that routes; the others leave that alone


def architecture_of(args: argparse.Namespace) -> dict[str, Any]:
    """The architecture in `args`; its vocabulary is the model's, before padding."""
    routing = _SINKHORN if _SINKHORN in args.moe_router_load_balancing_type else _BY_SCORE
    architecture = {name: getattr(args, name) for name in ARCHITECTURE}
    return architecture | {"vocab_size": args.model_vocab_size, _BALANCING: routing}


def apply_architecture(args: argparse.Namespace, directory: Path) -> None:
    """Set the model flags in `args` to those of the checkpoint in `directory`.

    Raises:
        UsageError: when there is no readable `model.json`, or it holds something that is not a model flag.
    """
    stored = read_architecture(directory)
    if stored is None:
        raise UsageError(f"--use-checkpoint-args: {directory / FILE_NAME} does not exist")
    unknown = sorted(set(stored) - set(ARCHITECTURE))
    if unknown:
        raise UsageError(f"--use-checkpoint-args: {directory / FILE_NAME} has unknown entries: {', '.join(unknown)}")
    for name, value in stored.items():
        if (name, value) != (_BALANCING, _BY_SCORE):  # how else to balance is for this run to say
            setattr(args, name, value)
    args.model_vocab_size = stored.get("vocab_size")


def read_architecture(directory: Path) -> dict[str, Any] | None:
    """What `model.json` in `directory` holds; None when there is none.

    Raises:
        UsageError: when it is not a JSON object.
    """
    path = directory / FILE_NAME
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can not be read: {error}") from None
    if not isinstance(stored, dict):
        raise UsageError(f"{path} is not a JSON object")
    return stored


def write_architecture(directory: Path, architecture: dict[str, Any]) -> None:
    """Write `model.json`, complete or not at all."""
    temporary = directory / f".{FILE_NAME}.{os.getpid()}"
    temporary.write_text(json.dumps(architecture, indent=2) + "\n", encoding="utf-8")
    temporary.replace(directory / FILE_NAME)


def require_same_architecture(architecture: dict[str, Any], directory: Path, advice: str) -> None:
    """Refuse `directory` when it holds checkpoints of another model; what only one of the two has is passed by.

    Args:
        architecture: This run's, as far as it is known.
        directory: May hold a `model.json`.
        advice: Ends the complaint.

    Raises:
        UsageError: naming the first flag that differs.
    """
    for name, value in (read_architecture(directory) or {}).items():
        if name not in architecture or name in _NOT_PART_OF_THE_WEIGHTS:
            continue
        ours = architecture[name]
        unknown_yet = name == "vocab_size" and ours is None  # the tokenizer will say
        if ours != value and not unknown_yet:
            raise UsageError(f"{directory} holds another model: {name} is {value} there and {ours} here; {advice}")
