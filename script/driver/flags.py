"""The flags of run_tensor_collection.sh and run_tensor_draw.sh as one table, and the converters of their values."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.quantscope.flags.capture import DEFAULT_DIRECTORY
from megatron.quantscope.flags.quantization import QUANT_TYPES
from megatron.quantscope.flags.table import Flag, FlagGroup
from megatron.quantscope.flags.values import non_negative_int, positive_float, positive_int

DEFAULT_TYPE = "mxfp8"
DEFAULT_DRAW_DIRECTORY = "./draw"
DEFAULT_STALL_SECONDS = 300.0
DTYPES = ("bf16", "fp16", "fp32")
FP8 = "fp8"


def existing_path(text: str) -> Path:
    """A path to a file or directory that is there, made absolute."""
    path = Path(text).expanduser()
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text!r} does not exist: give an existing file or directory")
    return path.absolute()


def any_path(text: str) -> Path:
    """A path, made absolute."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path is not allowed")
    return Path(text).expanduser().absolute()


def compute_dtype(text: str) -> str:
    """A compute dtype of the trainer; fp8 is known, and refused by name."""
    if text == FP8:
        raise argparse.ArgumentTypeError(
            "fp8 is TransformerEngine's, whose GEMMs no --quant-type quantises; allowed: bf16, fp16, fp32, or fp8 in "
            "examples/llama/train_llama32_1b_h100_fp8.sh"
        )
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give one of {', '.join(DTYPES)}")
    return text


def quant_type(text: str) -> str:
    """A quantisation type that the trainer knows."""
    if text not in QUANT_TYPES:
        raise argparse.ArgumentTypeError(f"unknown quantisation type {text!r}; allowed: {', '.join(QUANT_TYPES)}")
    return text


WHAT = FlagGroup(
    "what to run",
    (
        Flag(name="--mode", metavar="MODE", help="the same as the first word"),
        Flag(
            name="--quant-type",
            type=quant_type,
            metavar="TYPE",
            help=f"the same as the second word: {', '.join(QUANT_TYPES)} (default "
            f"{DEFAULT_TYPE}; environment CUSTOM_QUANT_TYPE)",
        ),
        Flag(
            name="--control-iter",
            type=non_negative_int,
            default=1,
            metavar="N",
            help="N iterations are collected, in each the first M micro-batches (--collect-micro-batches), then "
            "training stops by itself; 0 = never stop (default 1)",
        ),
        Flag(
            name="--collect-micro-batches",
            type=positive_int,
            default=1,
            metavar="M",
            help="micro-batches kept in each collected iteration: --control-iter 3 keeps 3, --control-iter 3 "
            "--collect-micro-batches 2 keeps 6 (default 1)",
        ),
    ),
)
WHERE = FlagGroup(
    "where",
    (
        Flag(
            name="--tensor-dir",
            type=any_path,
            metavar="DIR",
            help=f"where the tensors are, or go to (default {DEFAULT_DIRECTORY}; environment TENSOR_SAVE_DIR)",
        ),
        Flag(name="--tensor-path", dest="tensor_path", type=any_path, metavar="DIR", help="the same as --tensor-dir"),
        Flag(
            name="--output-dir",
            type=any_path,
            metavar="DIR",
            help=f"where the figures go (default {DEFAULT_DRAW_DIRECTORY})",
        ),
        Flag(
            name="--checkpoint-path",
            type=existing_path,
            metavar="PATH",
            help="a Megatron checkpoint directory, a Llama-type GGUF file or a Hugging Face directory with safetensors "
            "(default: SmolLM2-135M, fetched once)",
        ),
        Flag(
            name="--tokenizer-path",
            type=existing_path,
            metavar="PATH",
            help="a tokenizer.json, a directory that holds one, or a sentencepiece model (default: the "
            "checkpoint's own)",
        ),
        Flag(
            name="--data-path",
            type=any_path,
            metavar="PATH",
            help="the prefix of a Megatron .bin/.idx pair, or text to prepare: .txt, .jsonl, a Wikipedia dump .xml or "
            ".xml.bz2 (default: 106 Wikipedia articles, fetched once)",
        ),
    ),
)
HOW = FlagGroup(
    "how",
    (
        Flag(
            name="--dtype",
            type=compute_dtype,
            default=DTYPES[0],
            metavar="DTYPE",
            help=f"compute dtype: {', '.join(DTYPES)} (default {DTYPES[0]})",
        ),
        Flag(name="--nproc", type=positive_int, default=1, metavar="N", help="processes on this machine (default 1)"),
        Flag(
            name="--stall-timeout",
            type=positive_float,
            default=DEFAULT_STALL_SECONDS,
            metavar="SECONDS",
            help=f"stop a run that makes no progress for so long (default {DEFAULT_STALL_SECONDS:g})",
        ),
        Flag(name="--max-workers", type=positive_int, metavar="N", help="processes that draw (default: the cores)"),
        Flag(name="--verbose", switch=True, default=False, help="show everything that the trainer prints"),
    ),
)
FLAGS = (WHAT, WHERE, HOW)
