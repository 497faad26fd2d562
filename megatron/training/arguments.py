"""From a command line to checked arguments, without torch: `--help` and every wrong flag are answered at once.

Three steps: parse by the tables in `flags`, refuse what is known but can not be honoured, then fill in and check what
follows from several flags (`validation`).
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron.quantscope.flags import Flag, add_flags, refused_flags
from megatron.training.checkpoint.architecture import apply_architecture
from megatron.training.checks.without_effect import without_effect
from megatron.training.failure import UsageError
from megatron.training.flags import FLAG_GROUPS
from megatron.training.flags.upstream import refusal
from megatron.training.validation import complete_model, validate

PROGRAM = "pretrain_gpt.py"
SIMILAR = 0.75  # of 1: a flag this close to an unknown one is suggested
DESCRIPTION = "Train a GPT or Llama-type model on megatron-core, with quantised GEMMs and the tensors around them kept."


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, without the usage of two hundred flags."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the trainer's command line.

    Args:
        argv: The arguments after the program's name.

    Returns:
        A namespace with Megatron-LM's attribute names, and every derived value filled in; `without_effect` is a line
        about flags that do nothing in this run, or None.

    Raises:
        UsageError: one line for each thing that is wrong, with the value and what is allowed.
    """
    args, unknown = build_parser().parse_known_args([_hyphenated(word) for word in argv])
    if unknown:
        raise UsageError("\n".join(_unknown(flag) for flag in unknown if _names_flag(flag)) or _stray(unknown))
    refused = refused_flags(args, FLAG_GROUPS)
    if refused:
        raise UsageError("\n".join(refused))
    args.model_vocab_size = None
    if args.use_checkpoint_args:
        if args.load is None:
            raise UsageError("--use-checkpoint-args needs --load DIR")
        apply_architecture(args, Path(args.load))
    args.without_effect = without_effect(args)
    return validate(args)


def arguments_with(**values: Any) -> argparse.Namespace:
    """The arguments of a model that is not trained here: every flag's default, `values`, and what follows from them.

    Args:
        **values: Flag destinations and their values; the model's sizes and `seq_length` or `max_position_embeddings`
            must be among them.

    Raises:
        UsageError: for a name that is no flag's destination, and for sizes that do not fit.
    """
    args = build_parser().parse_args([])
    unknown = sorted(name for name in values if not hasattr(args, name))
    if unknown:
        raise UsageError(f"no flag has the destination {', '.join(unknown)}")
    vars(args).update(values, model_vocab_size=values.get("vocab_size"))
    return complete_model(args)


def build_parser() -> argparse.ArgumentParser:
    """The parser of every flag that the trainer knows."""
    parser = _Parser(
        prog=PROGRAM,
        description=DESCRIPTION,
        allow_abbrev=False,
        usage=f"{PROGRAM} FLAGS, or torchrun --nproc_per_node N {PROGRAM} FLAGS",
    )
    add_flags(parser, FLAG_GROUPS)
    return parser


def _known() -> list[Flag]:
    return [flag for group in FLAG_GROUPS for flag in group.flags]


def _hyphenated(word: str) -> str:
    """A word of the command line, a flag's name in it with hyphens: Megatron-LM has some with underscores."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _names_flag(word: str) -> bool:
    """Whether a word that no flag took is a flag itself, and not the value of one, such as -1."""
    return word.startswith("-") and not word[1:2].isdigit()


def _unknown(flag: str) -> str:
    name = flag.partition("=")[0]
    known_upstream = refusal(name)
    if known_upstream is not None:
        return known_upstream
    near = difflib.get_close_matches(name, [known.name for known in _known()], n=1, cutoff=SIMILAR)
    hint = f"; did you mean {near[0]}?" if near else "; --help lists all flags"
    return f"unknown flag {name}{hint}"


def _stray(values: Sequence[str]) -> str:
    return f"{', '.join(map(repr, values))} belongs to no flag; --help lists all flags"
