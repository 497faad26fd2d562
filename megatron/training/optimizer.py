"""Megatron's optimizer and the schedules of learning rate and weight decay, from the flags.

The scheduler counts in samples, so that a schedule means the same for any batch size: iterations are multiplied by the
global batch size.
"""

from __future__ import annotations

import argparse
from dataclasses import fields

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training.checkpoint.optimizer_state import prepare
from megatron.training.model import compute_dtype


def build_optimizer(args: argparse.Namespace, model: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Megatron's optimizer over the parameters of `model`, each flag under its field's name."""
    names = {field.name for field in fields(OptimizerConfig)}
    config = OptimizerConfig(
        **{name: value for name, value in vars(args).items() if name in names}, params_dtype=compute_dtype(args)
    )
    optimizer = get_megatron_optimizer(config, model)
    prepare(optimizer)
    return optimizer


def build_scheduler(args: argparse.Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The schedules of learning rate and weight decay; that the warm-up is the shorter was seen with the flags."""
    decay = _samples(args, "lr_decay") or _training_samples(args)
    warmup = _samples(args, "lr_warmup") if args.lr_warmup_fraction is None else args.lr_warmup_fraction * decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=_training_samples(args),
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=_samples(args, "lr_wsd_decay"),
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def _samples(args: argparse.Namespace, part: str) -> int | None:
    """Length of a part of the schedule in samples, however it was given."""
    iterations = getattr(args, f"{part}_iters")
    return getattr(args, f"{part}_samples") or (iterations and iterations * args.global_batch_size)


def _training_samples(args: argparse.Namespace) -> int:
    return int(args.train_samples or args.train_iters * args.global_batch_size)
