"""The command lines of run_tensor_collection.sh and run_tensor_draw.sh.

Both take `[MODE] [TYPE]` as words, the same as `--mode MODE --quant-type TYPE`, and one table of flags; what stands
after `--` goes to the trainer as it is, or to the visualizer where that alone runs. Only the standard library is needed
to parse, so that --help and wrong usage answer before anything is set up.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from megatron.quantscope.flags.capture import DEFAULT_DIRECTORY
from megatron.quantscope.flags.table import add_flags
from script.data.command_line import Parser
from script.driver.flags import DEFAULT_DRAW_DIRECTORY, DEFAULT_TYPE, FLAGS, any_path, quant_type

BATCH_TYPES = ("bf16", "fp16", "mxfp8", "mxfp4", "hifp8")
TYPE_VARIABLE = "CUSTOM_QUANT_TYPE"
DIRECTORY_VARIABLE = "TENSOR_SAVE_DIR"
SEPARATOR = "--"


@dataclass(frozen=True)
class Mode:
    """One mode of a program, and what it is for."""

    name: str
    help: str


@dataclass(frozen=True, kw_only=True)
class Program:
    """One of the two programs: its name, what it does, its modes, the default first, and what may follow `--`."""

    name: str
    help: str
    modes: tuple[Mode, ...]
    passed_on: str = "flags of the trainer"

    @property
    def mode_names(self) -> tuple[str, ...]:
        """The allowed values of MODE."""
        return tuple(mode.name for mode in self.modes)


COLLECTION = Program(
    name="run_tensor_collection.sh",
    help="Train with quantised GEMMs and keep the tensors that went in and came out.",
    modes=(
        Mode("single", "one quantisation type"),
        Mode("batch", f"{', '.join(BATCH_TYPES)} in turn, from the same checkpoint, seed and data"),
        Mode("quick", "one type on the smallest model, random weights and mock data: nothing is downloaded"),
    ),
)
DRAW = Program(
    name="run_tensor_draw.sh",
    help="Draw the tensors of a capture; collect them first if asked to.",
    modes=(
        Mode("visualize", "draw what lies in --tensor-dir (of one type, if TYPE is given)"),
        Mode("collect", "as run_tensor_collection.sh single"),
        Mode("both", "collect, then draw"),
    ),
    passed_on="flags of the trainer; with visualize those of tensor_visualizer.py",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for, checked; paths are absolute.

    Attributes:
        quant_type: None: not given by hand.
        default_type: What holds where one is needed and none was given: the environment's, else mxfp8.
        passed_on: What stood after `--`.
        (the others): As the flags of the same name.
    """

    mode: str
    quant_type: str | None
    default_type: str
    control_iter: int
    collect_micro_batches: int
    tensor_dir: Path
    output_dir: Path
    checkpoint_path: Path | None
    tokenizer_path: Path | None
    data_path: Path | None
    dtype: str
    nproc: int
    stall_timeout: float
    max_workers: int | None
    verbose: bool
    passed_on: tuple[str, ...] = ()


class _Parser(Parser):
    """The project's parser, for one of the two programs."""

    def __init__(self, program: Program) -> None:
        modes = "\n".join(f"  {mode.name:<10} {mode.help}" for mode in program.modes)
        super().__init__(
            prog=program.name,
            usage=f"{program.name} [{'|'.join(program.mode_names)}] [TYPE] [options] [-- {program.passed_on}]",
            description=f"{program.help}\n\nmodes (default {program.mode_names[0]}):\n{modes}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("words", nargs="*", help=argparse.SUPPRESS)
        add_flags(self, FLAGS)

    def error(self, message: str) -> NoReturn:
        """Name flags without argparse's `argument` before them."""
        super().error(message.removeprefix("argument "))


def parse(program: Program, argv: Sequence[str]) -> Options:
    """Read a command line; wrong usage exits with 2 and one line, --help with 0."""
    own, passed_on = _split(argv)
    parser = _Parser(program)
    given = parser.parse_intermixed_args(own)
    word_mode, word_type = _words(parser, program, given.words)
    mode = _agreed(parser, "mode", word_mode, given.mode) or program.mode_names[0]
    if mode not in program.mode_names:
        parser.error(f"unknown mode {mode!r}; allowed: {', '.join(program.mode_names)}")
    directory = _agreed(parser, "tensor directory", given.tensor_dir, given.tensor_path)
    variable_type = os.environ.get(TYPE_VARIABLE)
    return Options(
        mode=mode,
        quant_type=_agreed(parser, "type", word_type, given.quant_type),
        default_type=_checked_type(parser, variable_type or DEFAULT_TYPE, f"environment {TYPE_VARIABLE}: "),
        control_iter=given.control_iter,
        collect_micro_batches=given.collect_micro_batches,
        tensor_dir=directory or any_path(os.environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY),
        output_dir=given.output_dir or any_path(DEFAULT_DRAW_DIRECTORY),
        checkpoint_path=given.checkpoint_path,
        tokenizer_path=given.tokenizer_path,
        data_path=given.data_path,
        dtype=given.dtype,
        nproc=given.nproc,
        stall_timeout=given.stall_timeout,
        max_workers=given.max_workers,
        verbose=given.verbose,
        passed_on=passed_on,
    )


def usage_error(program: Program, message: str) -> NoReturn:
    """Exit with 2 and one line, as for any wrong usage."""
    _Parser(program).error(message)


def _split(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    words = list(argv)
    if SEPARATOR not in words:
        return words, ()
    at = words.index(SEPARATOR)
    return words[:at], tuple(words[at + 1 :])


def _words(parser: _Parser, program: Program, words: Sequence[str]) -> tuple[str | None, str | None]:
    """The mode and the type that were given as words."""
    if len(words) > 2:
        parser.error(f"{words[2]!r} is one word too many; allowed: [{'|'.join(program.mode_names)}] [TYPE]")
    mode = words[0] if words else None
    return mode, _checked_type(parser, words[1]) if len(words) == 2 else None


def _checked_type(parser: _Parser, text: str, source: str = "") -> str:
    try:
        return quant_type(text)
    except argparse.ArgumentTypeError as error:
        parser.error(f"{source}{error}")


Value = TypeVar("Value")


def _agreed(parser: _Parser, subject: str, one: Value | None, other: Value | None) -> Value | None:
    """The value that was given in one way or the other; two different ones contradict each other."""
    if one is not None and other is not None and one != other:
        parser.error(f"two different values for the {subject}: {one} and {other}")
    return one if one is not None else other
