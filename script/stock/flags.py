"""The flags of quantisation and capture: checked before Megatron-LM is imported, and declared on its parser.

They are parsed twice. Once here, from the whole command line, so that what is wrong with them is said at once and in
one line; and once by Megatron-LM's own parser, so that they stand in its `--help`, its `args` and its checkpoints.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from megatron.quantscope.capture import CaptureConfig
from megatron.quantscope.flags import CAPTURE_FLAGS, QUANTIZATION_FLAGS, add_flags, refused_flags
from megatron.quantscope.gemm import QuantConfig
from script.stock import cpu

GROUPS = (QUANTIZATION_FLAGS, CAPTURE_FLAGS)
# Rehearsals run steps of this tree's own trainer and end.
TRAINER_ONLY = ("tensor_dry_run", "tensor_check_interference")

AddArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


class UsageError(Exception):
    """The command line can not be honoured. Exit code 2."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def checked(argv: Sequence[str]) -> tuple[QuantConfig, CaptureConfig]:
    """What is quantised and what is kept, by those of our flags that are in `argv`; the others are not looked at.

    Raises:
        UsageError: one line for each thing that is not allowed.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_flags(parser, GROUPS)
    ours, _ = parser.parse_known_args(argv)
    refused = refused_flags(ours, GROUPS)
    for name in TRAINER_ONLY:
        if vars(ours)[name]:
            refused.append(f"--{name.replace('_', '-')}: needs the pretrain_gpt.py of this tree")
    if refused:
        raise UsageError("\n".join(refused))
    try:
        return QuantConfig.from_namespace(ours), CaptureConfig.from_namespace(ours)
    except ValueError as error:
        raise UsageError(str(error)) from None


def adding(upstream: AddArguments) -> AddArguments:
    """Megatron-LM's `add_megatron_arguments` with our flags after its own."""

    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = upstream(parser)
        add_flags(parser, GROUPS)
        cpu.set_defaults(parser)
        return parser

    return add_megatron_arguments
