"""What an optimizer's state in a checkpoint is the state of, so that it is not loaded into that of another optimizer.

megatron-core finds out by the names that are missing, and says so in its own terms, or not at all. Precision matters as
far as the state is laid out by it: the plain optimizer keeps float32 copies of 16-bit weights, the distributed one has
a buffer for each dtype, and parameter by parameter all is float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.training.failure import UsageError

TRAITS = "optimizer_traits"  # their name in a checkpoint
ANY_LAYOUT = ("fully_reshardable", "fully_sharded_model_space")  # sharding types: parameter by parameter
WITHOUT_IT = "--no-load-optim takes weights and progress without it"
_FP32 = "fp32"


def traits_of(args: argparse.Namespace) -> dict[str, str]:
    """What the state of the optimizer that the flags ask for depends on, by names for the user."""
    keeps_nothing = args.optimizer == "sgd" and not args.sgd_momentum
    return {
        "optimizer": args.optimizer + " without momentum" * keeps_nothing,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else _FP32,
        "--decoupled-lr": "not given" if args.decoupled_lr is None else "given",  # groups of parameters of their own
    }


def require_same_traits(args: argparse.Namespace, path: Path, stored: Mapping[str, Any], sharding: str | None) -> None:
    """See that the optimizer's state in a checkpoint is that of an optimizer like the flags'.

    Args:
        args: The flags.
        path: The checkpoint.
        stored: What `traits_of` gave when it was written; what is missing is taken to agree.
        sharding: How the distributed optimizer's state is laid out; None: it is the plain optimizer's.

    Raises:
        UsageError: when it is not.
    """
    for name, ours in traits_of(args).items():
        theirs = stored.get(name, ours)
        if theirs != ours and not (name == "precision" and _same_layout(theirs, ours, sharding)):
            raise UsageError(
                f"{path} holds the state of another optimizer ({name}: {theirs} there and {ours} here); {WITHOUT_IT}"
            )


def _same_layout(one: str, other: str, sharding: str | None) -> bool:
    """Whether state that was written under one precision can be loaded under another."""
    if sharding is None:
        return _FP32 not in (one, other)
    return sharding in ANY_LAYOUT
