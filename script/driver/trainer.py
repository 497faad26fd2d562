"""The trainer's command line: what every run of the drivers shares, and what a run's options add.

Later flags override earlier ones, and what stood after `--` comes last, so that every choice made here can be changed.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron.quantscope.flags.table import refused_flags
from megatron.training.arguments import build_parser, parse_arguments
from megatron.training.failure import UsageError
from megatron.training.flags import FLAG_GROUPS
from script.driver.environment import ROOT
from script.driver.inputs import BadInput
from script.driver.options import COLLECTION, Options

_, BATCH, _ = COLLECTION.mode_names
TRAINER = ROOT / "pretrain_gpt.py"
ITERATIONS = 100  # of a run that nothing stops earlier
WORLD_SIZE_VARIABLE = "WORLD_SIZE"

# The sequence is a multiple of 32, the block of the MX formats, which runs along tokens in the weight gradient. The
# rate is one at which bf16 weights move within a few steps (a change below half a bf16 ulp would be lost).
TRAINING = (
    *("--micro-batch-size", "1"),
    *("--lr", "1e-4", "--lr-decay-style", "constant", "--weight-decay", "0.1", "--clip-grad", "1.0"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--seed", "1234"),
    *("--log-interval", "1", "--eval-iters", "0"),
)
DTYPE_FLAGS: dict[str, tuple[str, ...]] = {
    "bf16": ("--bf16",),
    # Megatron's own start, 2^32, would overflow the first gradients: they are what is to be looked at.
    "fp16": ("--fp16", "--initial-loss-scale", "1024"),
    "fp32": (),
}


@dataclass(frozen=True)
class Inputs:
    """The trainer's flags for what it reads: model, tokenizer and data."""

    flags: tuple[str, ...]


QUICK_INPUTS = Inputs(
    (
        *("--num-layers", "4", "--hidden-size", "256", "--ffn-hidden-size", "512", "--num-attention-heads", "8"),
        *("--group-query-attention", "--num-query-groups", "4", "--seq-length", "128"),
        *("--max-position-embeddings", "128", "--position-embedding-type", "rope", "--normalization", "RMSNorm"),
        *("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "1024", "--mock-data"),
    )
)
SEQUENCE_LENGTH = 256  # of a run with a checkpoint: 960 files and 731 MB a micro-batch for the default model


def file_inputs(
    *, checkpoint: Path, has_architecture: bool, tokenizer: Path, tokenizer_kind: str, data_prefix: Path, cache: Path
) -> Inputs:
    """The trainer's flags for a checkpoint, a tokenizer and a token file.

    Args:
        checkpoint: A Megatron checkpoint directory.
        has_architecture: Whether it says its own architecture (model.json).
        tokenizer: The tokenizer's file or directory.
        tokenizer_kind: The trainer's name of its kind.
        data_prefix: PREFIX of the .bin and .idx.
        cache: Where the index of samples is kept, so that nothing is written beside the data.
    """
    return Inputs(
        (
            *("--load", str(checkpoint), "--finetune", "--no-load-optim", "--no-load-rng"),
            "--exit-on-missing-checkpoint",
            *(("--use-checkpoint-args",) if has_architecture else ()),
            *("--tokenizer-type", tokenizer_kind, "--tokenizer-model", str(tokenizer)),
            *("--data-path", str(data_prefix), "--split", "100,0,0", "--data-cache-path", str(cache)),
            *("--seq-length", str(SEQUENCE_LENGTH)),
        )
    )


def flags(options: Options, quant_type: str, inputs: Inputs) -> tuple[str, ...]:
    """The trainer's whole command line after the program's name."""
    own = build_parser().parse_known_args([*TRAINING, *options.passed_on])[0]
    model_parallel = own.tensor_model_parallel_size * own.pipeline_model_parallel_size
    samples = own.micro_batch_size * max(1, options.nproc // model_parallel) * options.collect_micro_batches
    return (
        *TRAINING,
        *inputs.flags,
        *DTYPE_FLAGS[options.dtype],
        *("--global-batch-size", str(samples), "--train-iters", str(max(ITERATIONS, options.control_iter))),
        *(() if _has_formats_of_its_own(options, own) else ("--quant-type", quant_type)),
        *("--save-tensors", "--tensor-save-dir", str(options.tensor_dir)),
        *("--control-iter", str(options.control_iter)),
        *("--collect-micro-batches", str(options.collect_micro_batches)),
        *options.passed_on,
    )


def _has_formats_of_its_own(options: Options, given: Namespace) -> bool:
    """Whether a preset or a recipe file after `--` says what is quantised, and no type by hand stands beside it."""
    by_hand = options.quant_type is not None or options.mode == BATCH
    return not by_hand and bool(given.quant_preset or given.quant_recipe)


def launch(options: Options, trainer_flags: Sequence[str]) -> list[str]:
    """The command that starts the trainer: plain Python for one process, torchrun for several."""
    several = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.nproc}")
    return [sys.executable, "-u", *(several if options.nproc > 1 else ()), str(TRAINER), *trainer_flags]


def check_flags(options: Options) -> None:
    """Refuse what the trainer would refuse of the flags after `--`, before anything is set up.

    Raises:
        BadInput: One line for a flag that is unknown or can not be honoured, or a world size that does not fit.
    """
    try:
        given, unknown = build_parser().parse_known_args(list(options.passed_on))
    except UsageError as error:
        raise BadInput(f"flags of the trainer: {error}") from error
    if unknown:
        raise BadInput(f"the trainer has no flag {unknown[0]}; pretrain_gpt.py --help lists all")
    if refused := refused_flags(given, FLAG_GROUPS):
        raise BadInput(refused[0])
    if given.quant_recipe is not None and not Path(given.quant_recipe).is_file():
        raise BadInput(f"--quant-recipe: there is no file {given.quant_recipe}")
    if given.quant_recipe is not None and (options.quant_type is not None or options.mode == BATCH):
        raise BadInput("--quant-recipe says what is quantised how: leave out the type, and batch, which has its own")
    sizes = given.tensor_model_parallel_size, given.pipeline_model_parallel_size, given.context_parallel_size
    if options.nproc % (sizes[0] * sizes[1] * sizes[2]):
        raise BadInput(
            f"--nproc {options.nproc} is not a multiple of tensor x pipeline x context parallel size "
            f"({sizes[0]} x {sizes[1]} x {sizes[2]})"
        )


def arguments(options: Options, trainer_flags: Sequence[str]) -> Namespace:
    """The trainer's arguments as it will read and check them itself.

    Raises:
        BadInput: One line, what the trainer would say.
    """
    try:
        with _world_size(options.nproc):
            return parse_arguments(trainer_flags)
    except UsageError as error:
        raise BadInput(str(error).splitlines()[0]) from error


@contextmanager
def _world_size(size: int) -> Iterator[None]:
    """The environment that torchrun would give, as far as the trainer's checks read it."""
    former = os.environ.get(WORLD_SIZE_VARIABLE)
    os.environ[WORLD_SIZE_VARIABLE] = str(size)
    try:
        yield
    finally:
        os.environ.pop(WORLD_SIZE_VARIABLE)
        if former is not None:
            os.environ[WORLD_SIZE_VARIABLE] = former
