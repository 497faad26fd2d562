"""Flags that do nothing in this run, for want of another one: said in one line at the start, and not refused.

Launch scripts of Megatron-LM carry such flags from run to run (`--no-load-optim` at a first start, TensorBoard's
without a directory), so refusing them would refuse these scripts. A flag counts as given where its value is not its
default's: to give the default changes nothing in any run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.training.flags import FLAG_GROUPS

_FLAGS = {flag.name: flag for group in FLAG_GROUPS for flag in group.flags}


@dataclass(frozen=True, kw_only=True)
class Need:
    """Flags that do something with another one only.

    Attributes:
        flags: Their names.
        needs: What they need, as the user reads it.
        met: Whether it is there, in arguments that `validation` has not completed yet.
        part: What of them is without effect; empty: all.
    """

    flags: tuple[str, ...]
    needs: str
    met: Callable[[argparse.Namespace], Any]
    part: str = ""


NEEDS: tuple[Need, ...] = (
    Need(
        flags=(
            "--async-save",
            "--save-retain-interval",
            "--no-save-optim",
            "--no-save-rng",
            "--no-ckpt-fully-parallel-save",
            "--ckpt-assume-constant-structure",
        ),
        needs="--save",
        met=lambda a: a.save,
    ),
    Need(
        flags=("--exit-signal-handler",),
        needs="--save",
        met=lambda a: a.save,
        part="the checkpoint of ",
    ),
    Need(
        flags=("--exit-signal",),
        needs="--exit-signal-handler",
        met=lambda a: a.exit_signal_handler,
    ),
    Need(
        flags=(
            "--finetune",
            "--no-load-optim",
            "--no-load-rng",
            "--exit-on-missing-checkpoint",
            "--override-opt-param-scheduler",
            "--use-checkpoint-opt-param-scheduler",
        ),
        needs="--load",
        met=lambda a: a.load,
    ),
    Need(
        flags=(
            "--tensorboard-log-interval",
            "--tensorboard-queue-size",
            "--log-timers-to-tensorboard",
            "--log-memory-to-tensorboard",
            "--log-batch-size-to-tensorboard",
            "--log-validation-ppl-to-tensorboard",
            "--log-world-size-to-tensorboard",
            "--no-log-loss-scale-to-tensorboard",
        ),
        needs="--tensorboard-dir",
        met=lambda a: a.tensorboard_dir,
    ),
    Need(
        flags=("--timing-log-option", "--no-barrier-with-level-1-timing", "--log-timers-to-tensorboard"),
        needs="--timing-log-level",
        met=lambda a: a.timing_log_level,
    ),
    Need(flags=("--manual-gc-interval", "--no-manual-gc-eval"), needs="--manual-gc", met=lambda a: a.manual_gc),
    Need(
        flags=(
            "--use-pytorch-profiler",
            "--profile-step-start",
            "--profile-step-end",
            "--profile-ranks",
            "--pytorch-profiler-collect-shapes",
            "--pytorch-profiler-collect-callstack",
        ),
        needs="--profile",
        met=lambda a: a.profile,
    ),
    Need(flags=("--memory-snapshot-path",), needs="--record-memory-history", met=lambda a: a.record_memory_history),
    Need(
        flags=("--loss-scale",),
        needs="--fp16, --bf16 or --use-distributed-optimizer",
        met=lambda a: a.fp16 or a.bf16 or a.use_distributed_optimizer,
    ),
    Need(
        flags=("--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis"),
        needs="--fp16 without --loss-scale",
        met=lambda a: a.fp16 and a.loss_scale is None,
    ),
    Need(
        flags=("--adam-beta1", "--adam-beta2", "--adam-eps"),
        needs="--optimizer adam",
        met=lambda a: a.optimizer == "adam",
    ),
    Need(flags=("--sgd-momentum",), needs="--optimizer sgd", met=lambda a: a.optimizer == "sgd"),
    Need(
        flags=("--decoupled-min-lr",),
        needs="--decoupled-lr",
        met=lambda a: a.decoupled_lr is not None,
    ),
    Need(
        flags=("--lr-wsd-decay-style", "--lr-wsd-decay-iters", "--lr-wsd-decay-samples"),
        needs="--lr-decay-style WSD",
        met=lambda a: a.lr_decay_style == "WSD",
    ),
    Need(
        flags=("--start-weight-decay", "--end-weight-decay"),
        needs="--weight-decay-incr-style linear or cosine",
        met=lambda a: a.weight_decay_incr_style != "constant",
    ),
    Need(
        flags=("--cross-entropy-fusion-impl",),
        needs="--cross-entropy-loss-fusion",
        met=lambda a: a.cross_entropy_loss_fusion,
    ),
    Need(
        flags=("--recompute-method", "--recompute-num-layers"),
        needs="--recompute-granularity full",
        met=lambda a: a.recompute_granularity == "full",
    ),
    Need(
        flags=("--num-query-groups",),
        needs="--group-query-attention",
        met=lambda a: a.group_query_attention or a.use_checkpoint_args,  # else it is the checkpoint's, and complete
    ),
    Need(
        flags=("--rope-scaling-factor",),
        needs="--use-rope-scaling",
        met=lambda a: a.use_rope_scaling or a.use_checkpoint_args,
    ),
    Need(
        flags=(
            "--moe-layer-freq",
            "--moe-router-topk",
            "--moe-router-score-function",
            "--moe-router-pre-softmax",
            "--moe-router-topk-scaling-factor",
            "--moe-router-dtype",
            "--moe-router-enable-expert-bias",
            "--moe-router-bias-update-rate",
            "--moe-router-load-balancing-type",
            "--moe-aux-loss-coeff",
            "--moe-z-loss-coeff",
            "--moe-input-jitter-eps",
            "--moe-token-dispatcher-type",
            "--moe-expert-capacity-factor",
            "--moe-pad-expert-input-to-capacity",
            "--moe-token-drop-policy",
            "--expert-tensor-parallel-size",
        ),
        needs="--num-experts",
        met=lambda a: a.num_experts is not None,
    ),
)


def without_effect(args: argparse.Namespace) -> str | None:
    """One line that names what was given in vain and what it needs; None where nothing was.

    Args:
        args: As parsed, before what follows from several flags is filled in.
    """
    idle = [
        f"{need.part}{name} (needs {need.needs})" for need in NEEDS for name in need.flags if _in_vain(args, name, need)
    ]
    return f"without effect here: {', '.join(idle)}" if idle else None


def _in_vain(args: argparse.Namespace, name: str, need: Need) -> bool:
    flag = _FLAGS[name]
    return getattr(args, flag.destination) != flag.default and not need.met(args)
