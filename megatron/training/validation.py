"""What follows from several flags together: defaults that depend on others, checks, and paths that must be there.

All of it runs before torch is imported, so that a wrong command line costs no start-up. What can not be combined stands
in the tables of `checks`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megatron.training.checkpoint import checkpoint_directory
from megatron.training.checkpoint.architecture import architecture_of, require_same_architecture
from megatron.training.checks import (
    CHECKPOINT_CHECKS,
    DATA_CHECKS,
    EXPERT_CHECKS,
    KERNEL_CHECKS,
    MODEL_CHECKS,
    PARALLELISM_CHECKS,
    QUANTIZED_KERNEL_CHECKS,
    REPORTING_CHECKS,
    SCHEDULE_CHECKS,
    check,
)
from megatron.training.checks.quantization import check_quantization
from megatron.training.data.data_lists import apply_data_lists
from megatron.training.failure import UsageError
from megatron.training.layout import complete_layout

DEFAULT_SPLIT = "969,30,1"
SWIGLU_WIDTH = 8 / 3  # of the hidden size: as many parameters in three matrices as 4 x has in two
SWIGLU_MULTIPLE = 64


def validate(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in what follows from the command line and the launcher's environment, and check it.

    Raises:
        UsageError: with the first line of the tables above that holds, or a path that is not there.
    """
    args.rank, args.world_size = _place_among_ranks()
    complete_model(args)
    args.seq_length = args.seq_length or args.max_position_embeddings
    check(args, PARALLELISM_CHECKS + EXPERT_CHECKS + KERNEL_CHECKS)
    _complete_batch(args)
    apply_data_lists(args)
    check(args, SCHEDULE_CHECKS + DATA_CHECKS + REPORTING_CHECKS + CHECKPOINT_CHECKS)
    check_quantization(args)
    check(args, QUANTIZED_KERNEL_CHECKS)
    if args.train_samples:
        args.train_iters = iterations_for(args)
    if args.data_path and args.split is None:
        args.split = DEFAULT_SPLIT
    _check_paths(args)
    return args


def _place_among_ranks() -> tuple[int, int]:
    """Number of this rank, and of all ranks, as the launcher says; a single one without launcher.

    Raises:
        UsageError: when what the environment says makes no sense.
    """
    given = {name: os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))}
    for name, value in given.items():
        if not (value.isascii() and value.isdigit()):
            raise UsageError(f"the environment's {name} is {value!r}, not a number; torchrun sets it, or unset it")
    rank, ranks = int(given["RANK"]), int(given["WORLD_SIZE"])
    if not 0 <= rank < ranks:
        raise UsageError(f"the environment's RANK is {rank}, and WORLD_SIZE {ranks}; torchrun sets both, or unset them")
    return rank, ranks


def complete_model(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in the model flags that follow from others, and check them (idempotent)."""
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    check(args, MODEL_CHECKS)
    if args.kv_channels is None:
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if not args.group_query_attention:
        args.num_query_groups = args.num_attention_heads
    if args.ffn_hidden_size is None:
        width = args.hidden_size * SWIGLU_WIDTH
        args.ffn_hidden_size = (
            int(width / SWIGLU_MULTIPLE) * SWIGLU_MULTIPLE or SWIGLU_MULTIPLE if args.swiglu else 4 * args.hidden_size
        )
    complete_layout(args)
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    if args.tensor_model_parallel_size == 1:
        args.sequence_parallel = False  # as Megatron-LM: there is nothing to split
    if args.bf16 and not args.grad_reduce_in_bf16:
        args.accumulate_allreduce_grads_in_fp32 = True
    if args.model_vocab_size is not None:
        set_vocabulary(args, args.model_vocab_size)
    return args


def set_vocabulary(args: argparse.Namespace, size: int) -> None:
    """Set the model's vocabulary: `size` tokens, and the rows of the embedding that follow."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.model_vocab_size = size
    args.padded_vocab_size = -(-size // multiple) * multiple


def _complete_batch(args: argparse.Namespace) -> None:
    ranks_a_sample = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    args.data_parallel_size = args.world_size // ranks_a_sample
    if args.global_batch_size is None:
        args.global_batch_size = (args.micro_batch_size or 0) * args.data_parallel_size
    if args.weight_decay_incr_style == "constant":
        args.start_weight_decay = args.end_weight_decay = args.weight_decay


def iterations_for(args: argparse.Namespace) -> int:
    """Iterations that --train-samples takes, with the batch growing as --rampup-batch-size says."""
    if not args.rampup_batch_size:
        return int(-(-args.train_samples // args.global_batch_size))
    start, increment, over = args.rampup_batch_size
    steps = (args.global_batch_size - start) // increment
    consumed = iterations = 0
    while consumed < args.train_samples:
        consumed += start + increment * min(steps, consumed * steps // over)
        iterations += 1
    return iterations


def _check_paths(args: argparse.Namespace) -> None:
    for flag in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for prefix in prefixes_of(getattr(args, flag) or []):
            for suffix in (".bin", ".idx"):
                _require(Path(prefix + suffix), f"--{flag.replace('_', '-')}")
    for flag in ("tokenizer_model", "vocab_file", "merge_file", "load"):
        path = getattr(args, flag)
        if path is not None and (flag != "load" or loads_weights(args)):
            _require(Path(path), f"--{flag.replace('_', '-')}")
    if loads_weights(args):
        _check_checkpoint(args, Path(args.load))


def _check_checkpoint(args: argparse.Namespace, directory: Path) -> None:
    checkpoint = checkpoint_directory.chosen(directory, args.ckpt_step)
    if checkpoint is None:
        raise UsageError(f"--load: no checkpoint in {directory} ({checkpoint_directory.LATEST} is missing)")
    require_same_architecture(architecture_of(args), directory, "--use-checkpoint-args takes its model flags")


def loads_weights(args: argparse.Namespace) -> bool:
    """Whether the model's weights come from a checkpoint, so that drawing random ones would be in vain."""
    return args.load is not None and not _starts_afresh(args)


def _starts_afresh(args: argparse.Namespace) -> bool:
    """True at the first start of a job that saves where it loads: there is nothing to load yet."""
    same = args.save is not None and Path(args.save).resolve() == Path(args.load).resolve()
    return same and not args.exit_on_missing_checkpoint and checkpoint_directory.latest(Path(args.load)) is None


def prefixes_of(values: list[str]) -> list[str]:
    """The data prefixes in a blend: all values, or every second one where weights stand between them."""
    weighted = len(values) % 2 == 0 and all(map(_is_number, values[::2]))
    return values[1::2] if weighted else values


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _require(path: Path, flag: str) -> None:
    if not path.exists():
        raise UsageError(f"{flag}: {path} does not exist")
