"""Batches, lengths of training and schedules that contradict each other."""

from __future__ import annotations

import argparse

from megatron.training.checks.table import Check


def _ramp(args: argparse.Namespace) -> list[int]:
    """Where a growing batch starts, and by how much it grows."""
    return list(args.rampup_batch_size[:2])


def _counts(args: argparse.Namespace) -> list[int]:
    """Micro-batches an iteration: at the end, and where a growing batch starts and by how many it grows."""
    batches = [args.global_batch_size, *(_ramp(args) if args.rampup_batch_size else ())]
    return [batch // (args.micro_batch_size * args.data_parallel_size) for batch in batches]


def _warms_up_past(args: argparse.Namespace, unit: str, end: str) -> bool:
    """Whether the warm-up lasts until `end`, where the decay is over: both count from the start of training."""
    last = getattr(args, end)
    return last is not None and getattr(args, f"lr_warmup_{unit}") >= last


SCHEDULE_CHECKS: tuple[Check, ...] = (
    (
        lambda a: not a.micro_batch_size,
        "--micro-batch-size is needed",
    ),
    (
        lambda a: a.global_batch_size % (a.micro_batch_size * a.data_parallel_size),
        "--global-batch-size {global_batch_size} is not a multiple of --micro-batch-size {micro_batch_size} x data "
        "parallel size {data_parallel_size}",
    ),
    (
        lambda a: bool(a.train_iters) == bool(a.train_samples),
        "give either --train-iters or --train-samples",
    ),
    (
        lambda a: a.train_iters and (a.lr_decay_samples or a.lr_warmup_samples or a.lr_wsd_decay_samples),
        "--train-iters goes with --lr-decay-iters, --lr-warmup-iters and --lr-wsd-decay-iters, not with samples",
    ),
    (
        lambda a: a.train_samples and (a.lr_decay_iters or a.lr_warmup_iters or a.lr_wsd_decay_iters),
        "--train-samples goes with --lr-decay-samples, --lr-warmup-samples and --lr-wsd-decay-samples, not with "
        "iterations",
    ),
    (
        lambda a: a.lr_warmup_fraction is not None and (a.lr_warmup_iters or a.lr_warmup_samples),
        "--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples",
    ),
    (
        lambda a: a.lr_warmup_fraction == 1,
        "--lr-warmup-fraction 1 leaves nothing to decay in; warm up shorter",
    ),
    (
        lambda a: _warms_up_past(a, "iters", "lr_decay_iters"),
        "--lr-warmup-iters {lr_warmup_iters} is not below --lr-decay-iters {lr_decay_iters}; warm up shorter",
    ),
    (
        lambda a: a.lr_decay_iters is None and _warms_up_past(a, "iters", "train_iters"),
        "--lr-warmup-iters {lr_warmup_iters} is not below --train-iters {train_iters}, the default of "
        "--lr-decay-iters; warm up shorter",
    ),
    (
        lambda a: _warms_up_past(a, "samples", "lr_decay_samples"),
        "--lr-warmup-samples {lr_warmup_samples} is not below --lr-decay-samples {lr_decay_samples}; warm up shorter",
    ),
    (
        lambda a: a.lr_decay_samples is None and _warms_up_past(a, "samples", "train_samples"),
        "--lr-warmup-samples {lr_warmup_samples} is not below --train-samples {train_samples}, the default of "
        "--lr-decay-samples; warm up shorter",
    ),
    (
        lambda a: a.rampup_batch_size and not a.train_samples,
        "--rampup-batch-size needs --train-samples",
    ),
    (
        lambda a: a.rampup_batch_size and a.rampup_batch_size[0] >= a.global_batch_size,
        "--rampup-batch-size starts at {rampup_batch_size[0]}, not below --global-batch-size {global_batch_size}",
    ),
    (
        lambda a: a.rampup_batch_size and (a.global_batch_size - a.rampup_batch_size[0]) % a.rampup_batch_size[1],
        "--rampup-batch-size does not reach --global-batch-size {global_batch_size} from {rampup_batch_size[0]} in "
        "steps of {rampup_batch_size[1]}",
    ),
    (
        lambda a: a.rampup_batch_size and any(n % (a.micro_batch_size * a.data_parallel_size) for n in _ramp(a)),
        "--rampup-batch-size {rampup_batch_size[0]} {rampup_batch_size[1]}: start and increment must be multiples of "
        "--micro-batch-size {micro_batch_size} x data parallel size {data_parallel_size}",
    ),
    (
        lambda a: (
            a.virtual_pipeline_model_parallel_size and any(n % a.pipeline_model_parallel_size for n in _counts(a))
        ),
        "the interleaved schedule takes micro-batches in groups of --pipeline-model-parallel-size "
        "{pipeline_model_parallel_size}: --global-batch-size {global_batch_size} (and the steps of "
        "--rampup-batch-size) must be multiples of that x --micro-batch-size {micro_batch_size} x data parallel size "
        "{data_parallel_size}",
    ),
    (
        lambda a: a.lr is None,
        "--lr is needed",
    ),
    (
        lambda a: a.min_lr > a.lr,
        "--min-lr {min_lr:g} is above --lr {lr:g}",
    ),
    (
        lambda a: a.lr_warmup_init > a.lr,
        "--lr-warmup-init {lr_warmup_init:g} is above --lr {lr:g}",
    ),
    (
        lambda a: a.lr_decay_style == "WSD" and not (a.lr_wsd_decay_iters or a.lr_wsd_decay_samples),
        "--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples",
    ),
    (
        lambda a: (
            a.weight_decay_incr_style != "constant" and (a.start_weight_decay is None or a.end_weight_decay is None)
        ),
        "--weight-decay-incr-style {weight_decay_incr_style} needs --start-weight-decay and --end-weight-decay",
    ),
    (
        lambda a: a.weight_decay_incr_style != "constant" and a.end_weight_decay < a.start_weight_decay,
        "--end-weight-decay {end_weight_decay:g} is below --start-weight-decay {start_weight_decay:g}",
    ),
    (
        lambda a: a.override_opt_param_scheduler and a.use_checkpoint_opt_param_scheduler,
        "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other",
    ),
)
