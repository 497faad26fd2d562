"""What every sub-command begins with: the capture, cut down to what the filters let through; and how it ends."""

from __future__ import annotations

import argparse
import io
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.analysis.selection import selection_of
from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.report.commands.parser import PROGRAM

if TYPE_CHECKING:
    from megatron.quantscope.analysis.study import Study
    from megatron.quantscope.capture import Capture
    from megatron.quantscope.report.progress import Progress

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def opened(options: argparse.Namespace, directory: str | Path | Sequence[str]) -> Capture:
    """The capture in a directory, or in those of several nodes, of the run and the rows that were asked for.

    Raises:
        CaptureError: There is none, or no row of it is left.
    """
    from megatron.quantscope.capture import open_capture

    selection = selection_of(options)
    capture = selection.of(open_capture(directory, run=options.run))
    if not capture.records:
        raise CaptureError(f"no row of {capture.directory} matches {selection}")
    return capture


def analysed(options: argparse.Namespace, target: Path, *, details: bool = True) -> Study:
    """The analysis of the capture `options.directory`, its tables in `target`.

    Raises:
        CaptureError: As of `opened`.
        AnalysisError: It can not go on.
    """
    from megatron.quantscope.analysis.analyse import analyse

    selection = selection_of(options)
    return analyse(
        opened(options, options.directory),
        target,
        workers_of(options),
        progress_of(options),
        options.formats,
        options.dask_scheduler,
        selection=str(selection) if selection else "",
        details=details,
    )


def workers_of(options: argparse.Namespace) -> int:
    """How many processes read: as many as were asked for, else one a core."""
    from megatron.quantscope.analysis.workers import default_workers

    return options.max_workers or default_workers()


def progress_of(options: argparse.Namespace) -> Progress:
    """Bars where stderr is a terminal, and none with --quiet."""
    from megatron.quantscope.report.progress import Progress

    return Progress(shown=False if options.quiet else None)


def complain(message: str, code: int) -> int:
    """One line on stderr, and the exit code that goes with it."""
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return code


def start_logging(options: argparse.Namespace) -> None:
    """Warnings to stderr; more with --verbose, errors only with --quiet."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # bytes of a file's name that are no text are shown as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    level = logging.INFO if getattr(options, "verbose", False) else logging.WARNING
    level = logging.ERROR if getattr(options, "quiet", False) else level
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports on its font cache
