"""The command line of tensor_visualizer.py as data: what each sub-command is called, takes and does.

Without the name of a sub-command the call draws everything (`DRAW`). Nothing heavy is imported until a command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatron.quantscope.analysis.selection import add_filters
from megatron.quantscope.flags.values import positive_int
from megatron.quantscope.formats import get_format
from megatron.quantscope.report.figures import TOPICS

PROGRAM = "tensor_visualizer.py"
SUFFIXES = ("png", "svg", "pdf")
METRICS = ("sqnr_db", "relative_error", "underflow_percent", "saturated_percent", "lost_percent", "dead_blocks")
GROUPINGS = ("tensor", "layer", "site", "type")
SHOWN_AT_MOST = 20
_PACKAGE = "megatron.quantscope.report.commands"


@dataclass(frozen=True)
class Argument:
    """One argument of a command, as argparse takes it; `alone` ones exclude each other."""

    names: tuple[str, ...]
    settings: dict[str, Any]
    alone: bool = False


def format_names(text: str) -> tuple[str, ...]:
    """`mxfp8,mxfp4` as the names of their records."""
    try:
        return tuple(dict.fromkeys(get_format(name).name for name in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _argument(*names: str, alone: bool = False, **settings: Any) -> Argument:
    return Argument(names, settings, alone)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A sub-command.

    Attributes:
        name: As it is called; empty for the call without one.
        summary: For the help.
        module: In this package; its `run` takes the parsed options.
        arguments: What it takes beside the filters.
        filters: Whether it takes those; a check of a capture is of all of it.
    """

    name: str
    summary: str
    module: str
    arguments: tuple[Argument, ...]
    filters: bool = True

    def function(self) -> Callable[[argparse.Namespace], int]:
        """What runs it."""
        found: Callable[[argparse.Namespace], int] = import_module(f"{_PACKAGE}.{self.module}").run
        return found


_CAPTURE = "a directory of type folders, one type folder, or any folder of captured .pt files"
_DIRECTORY = _argument("directory", metavar="DIR", help=f"the capture: {_CAPTURE}")
_RUN = _argument("--run", metavar="RUN_ID", help="this run instead of the latest of each type")
_OUTPUT_NAMES = ("--output_dir", "--output-dir")
_OUTPUT = _argument(*_OUTPUT_NAMES, required=True, metavar="OUT", help="where everything goes")
_WORKERS = _argument(
    "--max_workers",
    "--max-workers",
    type=positive_int,
    metavar="N",
    help="processes that read and draw (default: one a core)",
)
_DASK = _argument(
    "--dask_scheduler",
    "--dask-scheduler",
    metavar="ADDRESS",
    help="read on the workers of this Dask scheduler, which see the same files",
)
_FORMATS = _argument(
    "--formats", type=format_names, metavar="NAME,...", help="formats that are tried on every tensor (default: all)"
)
_QUIET = _argument("--quiet", action="store_true", help="no progress, no warnings")
_ANALYSIS = (_RUN, _WORKERS, _DASK, _FORMATS, _QUIET)

DRAW = Command(
    name="",
    summary="Draw a tensor capture: report.html, figures, tables and texts.",
    module="draw",
    arguments=(
        _argument(
            "--tensor_dir",
            "--tensor-dir",
            required=True,
            nargs="+",
            metavar="DIR",
            help=f"the capture: {_CAPTURE}; several where each node has its own",
        ),
        _OUTPUT,
        *_ANALYSIS,
        _argument("--quick", action="store_true", alone=True, help="quick_analysis.png, tables and texts only"),
        _argument(
            "--only", choices=TOPICS, metavar="TOPIC", alone=True, help="figures of one topic: " + ", ".join(TOPICS)
        ),
        _argument("--format", choices=SUFFIXES, default=SUFFIXES[0], help="of the figures (default: png)"),
        _argument("--verbose", action="store_true", help="say also which figures the capture has nothing for"),
    ),
)
COMMANDS = (
    Command(
        name="list",
        summary="list the tensors of a capture",
        module="listing",
        arguments=(_DIRECTORY, _RUN, _argument("--csv", action="store_true", help="every field, as CSV")),
    ),
    Command(
        name="show",
        summary=f"say everything about a tensor, or the first {SHOWN_AT_MOST} that the filters let through",
        module="show",
        arguments=(_argument("path", metavar="FILE", help=f"a captured file, or {_CAPTURE}"), _RUN, _FORMATS),
    ),
    Command(
        name="verify",
        summary="name every damaged, missing or foreign file",
        module="verify",
        arguments=(_DIRECTORY, _RUN),
        filters=False,
    ),
    Command(
        name="compare",
        summary="compare captures of the same samples, tensor by tensor",
        module="compare",
        arguments=(
            _argument(
                "directories",
                nargs="+",
                metavar="DIR",
                help="captures; the first is compared with",
            ),
            _argument(*_OUTPUT_NAMES, metavar="OUT", help="also write comparison.parquet, comparison.txt and figures"),
            _RUN,
            _WORKERS,
            _DASK,
            _QUIET,
        ),
    ),
    Command(
        name="what-if",
        summary="what every format and scale rule would do to a capture's tensors",
        module="what_if",
        arguments=(
            _DIRECTORY,
            _argument("--by", choices=GROUPINGS, default="site", help="what a line stands for (default: site)"),
            _argument("--metric", choices=METRICS, default=METRICS[0], help="what is printed (default: sqnr_db)"),
            _argument("--output", metavar="FILE", help="write the table there: .csv or .parquet"),
            *_ANALYSIS,
        ),
    ),
    Command(
        name="report",
        summary="write report.html alone, without figures",
        module="page",
        arguments=(
            _DIRECTORY,
            _OUTPUT,
            *_ANALYSIS,
        ),
    ),
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a call; `command` is the `Command` that it means.

    Exits with 2 on wrong usage, with 0 after `--help`, as argparse does.
    """
    named = {command.name: command for command in COMMANDS}
    command = named.get(arguments[0], DRAW) if arguments else DRAW
    options = _parser(command).parse_args(arguments if command is DRAW else arguments[1:])
    options.command = command
    return options


def _parser(command: Command) -> argparse.ArgumentParser:
    own = command is not DRAW
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} {command.name}".rstrip(),
        description=f"{command.summary[0].upper()}{command.summary[1:]}{'.' if own else ''}",
        epilog=None if own else _epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    alone = [argument for argument in command.arguments if argument.alone]
    group = parser.add_mutually_exclusive_group() if alone else parser  # argparse can not show an empty group
    for argument in command.arguments:
        (group if argument in alone else parser).add_argument(*argument.names, **argument.settings)
    if command.filters:
        add_filters(parser)
    return parser


def _epilog() -> str:
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name.ljust(width)}  {command.summary}" for command in COMMANDS]
    return "\n".join([f"commands ({PROGRAM} COMMAND --help says more):", *lines])
