"""Combinations of flags that can not be, as tables: each row says when it is wrong, and what the user reads then.

Rows are walked in order and may rely on the rows above them. `{name}` in a line is the argument of that name.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron.training.failure import UsageError

Check = tuple[Callable[[argparse.Namespace], Any], str]


def _ramp(args: argparse.Namespace) -> list[int]:
    """Where a growing batch starts, and by how much it grows."""
    return list(args.rampup_batch_size[:2])


MODEL_CHECKS: tuple[Check, ...] = (
    (
        lambda a: not (a.num_layers and a.hidden_size and a.num_attention_heads),
        "--num-layers, --hidden-size and --num-attention-heads are needed, or --use-checkpoint-args with --load",
    ),
    (
        lambda a: not (a.seq_length or a.max_position_embeddings),
        "--seq-length is needed",
    ),
    (
        lambda a: a.kv_channels is None and a.hidden_size % a.num_attention_heads,
        "--hidden-size {hidden_size} is not a multiple of --num-attention-heads {num_attention_heads}; set "
        "--kv-channels, or choose other sizes",
    ),
    (
        lambda a: a.group_query_attention and a.num_attention_heads % a.num_query_groups,
        "--num-attention-heads {num_attention_heads} is not a multiple of --num-query-groups {num_query_groups}",
    ),
    (
        lambda a: a.swiglu and a.squared_relu,
        "--swiglu and --squared-relu exclude each other",
    ),
    (
        lambda a: a.bf16 and a.fp16,
        "--bf16 and --fp16 exclude each other",
    ),
)
SHAPE_CHECKS: tuple[Check, ...] = (
    (
        lambda a: a.seq_length > a.max_position_embeddings,
        "--seq-length {seq_length} is longer than --max-position-embeddings {max_position_embeddings}",
    ),
    (
        lambda a: (
            a.world_size % (a.tensor_model_parallel_size * a.pipeline_model_parallel_size * a.context_parallel_size)
        ),
        "world size {world_size} is not a multiple of tensor x pipeline x context parallel size "
        "({tensor_model_parallel_size} x {pipeline_model_parallel_size} x {context_parallel_size}); start as many "
        "ranks with torchrun --nproc_per_node",
    ),
    (
        lambda a: a.num_attention_heads % a.tensor_model_parallel_size,
        "--num-attention-heads {num_attention_heads} is not a multiple of --tensor-model-parallel-size "
        "{tensor_model_parallel_size}",
    ),
    (
        lambda a: a.group_query_attention and a.num_query_groups % a.tensor_model_parallel_size,
        "--num-query-groups {num_query_groups} is not a multiple of --tensor-model-parallel-size "
        "{tensor_model_parallel_size}",
    ),
    (
        lambda a: a.ffn_hidden_size % a.tensor_model_parallel_size,
        "--ffn-hidden-size {ffn_hidden_size} is not a multiple of --tensor-model-parallel-size "
        "{tensor_model_parallel_size}",
    ),
    (
        lambda a: a.context_parallel_size > 1 and a.seq_length % (2 * a.context_parallel_size),
        "--seq-length {seq_length} is not a multiple of twice --context-parallel-size {context_parallel_size}",
    ),
    (
        lambda a: a.sequence_parallel and a.seq_length % (a.context_parallel_size * a.tensor_model_parallel_size),
        "--seq-length {seq_length} is not a multiple of --context-parallel-size {context_parallel_size} x "
        "--tensor-model-parallel-size {tensor_model_parallel_size}, which --sequence-parallel needs",
    ),
    (
        lambda a: a.num_layers % a.pipeline_model_parallel_size,
        "--num-layers {num_layers} is not a multiple of --pipeline-model-parallel-size {pipeline_model_parallel_size}",
    ),
    (
        lambda a: a.recompute_granularity == "full" and not (a.recompute_method and a.recompute_num_layers),
        "--recompute-granularity full needs --recompute-method and --recompute-num-layers",
    ),
    (
        lambda a: a.attention_backend in ("flash", "fused"),
        "--attention-backend {attention_backend} is not supported yet; allowed are auto, unfused and local",
    ),
    (
        lambda a: a.overlap_param_gather and not (a.use_distributed_optimizer and a.overlap_grad_reduce),
        "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce",
    ),
    (
        lambda a: a.accumulate_allreduce_grads_in_fp32 and a.grad_reduce_in_bf16,
        "--accumulate-allreduce-grads-in-fp32 and --grad-reduce-in-bf16 exclude each other",
    ),
)
TRAINING_CHECKS: tuple[Check, ...] = (
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
DATA_CHECKS: tuple[Check, ...] = (
    (
        lambda a: bool(a.mock_data) + bool(a.data_path) + bool(a.train_data_path) != 1,
        "give one of --data-path, --train-data-path and --mock-data",
    ),
    (
        lambda a: a.split and not a.data_path,
        "--split goes with --data-path",
    ),
    (
        lambda a: not a.tokenizer_type,
        "--tokenizer-type is needed; with --mock-data, NullTokenizer and --vocab-size will do",
    ),
    (
        lambda a: a.tokenizer_type == "NullTokenizer" and not a.vocab_size,
        "--tokenizer-type NullTokenizer needs --vocab-size",
    ),
    (
        lambda a: a.tokenizer_type == "GPT2BPETokenizer" and not (a.vocab_file and a.merge_file),
        "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file",
    ),
    (
        lambda a: (
            a.tokenizer_type not in ("NullTokenizer", "ByteLevelTokenizer", "GPT2BPETokenizer")
            and not a.tokenizer_model
        ),
        "--tokenizer-type {tokenizer_type} needs --tokenizer-model",
    ),
    (
        lambda a: a.save_interval and not a.save,
        "--save-interval needs --save",
    ),
)


def check(args: argparse.Namespace, checks: tuple[Check, ...]) -> None:
    """Walk `checks`.

    Raises:
        UsageError: with the line of the first row that holds.
    """
    for is_wrong, line in checks:
        if is_wrong(args):
            raise UsageError(line.format(**vars(args)))
