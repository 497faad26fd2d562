"""The call without a sub-command: analyse a capture and draw all of it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.analysis.selection import selection_of
from megatron.quantscope.report import numbers
from megatron.quantscope.report.commands.opening import DONE, FAILED, complain, opened, progress_of, workers_of

if TYPE_CHECKING:
    from megatron.quantscope.report.draw import Drawn


def run(options: argparse.Namespace) -> int:
    """Draw; 1 where something could not be read or drawn, the last line is the path to open."""
    from megatron.quantscope.report.draw import DrawError, draw, figures_for

    selection = selection_of(options)
    start = time.perf_counter()
    try:
        drawn = draw(
            opened(options, options.tensor_dir),
            options.output_dir,
            workers=workers_of(options),
            figures=figures_for(quick=options.quick, only=options.only),
            progress=progress_of(options),
            suffix=options.format,
            formats=options.formats,
            scheduler=options.dask_scheduler,
            selection=str(selection) if selection else "",
        )
    except DrawError as error:
        return complain(str(error), FAILED)
    return _told(drawn, options, time.perf_counter() - start)


def _told(drawn: Drawn, options: argparse.Namespace, seconds: float) -> int:
    written = len(drawn.figures.written)
    known = f" ({drawn.reused} of them known from before)" if drawn.reused else ""
    print(f"{drawn.files} tensors of {numbers.size(drawn.bytes)}{known}, {written} figures drawn in {seconds:.1f} s")
    code = DONE
    if drawn.problems:
        count, listing = len(drawn.problems), Path(options.output_dir) / "tensor_stats.txt"
        where = " ".join(options.tensor_dir)
        message = f"{count} problems in {where}, listed in {listing}; the first: {drawn.problems[0]}"
        code = complain(message, FAILED)
    if drawn.figures.failed:
        code = complain(f"{len(drawn.figures.failed)} figures could not be drawn", FAILED)
    print(drawn.open_first)
    return code
