#!/usr/bin/env python3
"""Draw a tensor capture: every statistic and figure of it, from one command.

    python script/visualization/tensor_visualizer.py --tensor_dir ./enhanced_tensor_logs --output_dir ./draw

README.md beside this file says what comes out. Exit code 0: all was read and drawn; 1: something was not, the last
lines say what; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # run as a file: the repository is what is imported from, whatever the current directory
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.quantscope.flags.values import positive_int
from megatron.quantscope.report.figures import TOPICS

if TYPE_CHECKING:
    from megatron.quantscope.capture import Capture

PROGRAM = "tensor_visualizer.py"
DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def build_parser() -> argparse.ArgumentParser:
    """The command line; options may be spelt with hyphens, too."""
    parser = argparse.ArgumentParser(
        prog="tensor_visualizer.py", description="Draw a tensor capture.", allow_abbrev=False
    )
    parser.add_argument(
        "--tensor_dir",
        "--tensor-dir",
        required=True,
        metavar="DIR",
        help="the capture: a directory of type folders, one type folder, or any folder of captured .pt files",
    )
    parser.add_argument(
        "--output_dir", "--output-dir", required=True, metavar="OUT", help="where figures, tables and texts go"
    )
    parser.add_argument(
        "--max_workers",
        "--max-workers",
        type=positive_int,
        metavar="N",
        help="processes that read and draw (default: one a core)",
    )
    parser.add_argument("--run", metavar="RUN_ID", help="draw this run instead of the latest of each type")
    selection = parser.add_mutually_exclusive_group()
    selection.add_argument(
        "--quick", action="store_true", help="draw quick_analysis.png only; tables and texts all the same"
    )
    selection.add_argument("--only", choices=TOPICS, metavar="TOPIC", help="draw one topic: " + ", ".join(TOPICS))
    parser.add_argument("--verbose", action="store_true", help="say also which figures the capture has nothing for")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code.
    """
    options = build_parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO if options.verbose else logging.WARNING, format="%(message)s", stream=sys.stderr
    )
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports on its font cache
    from megatron.quantscope.capture import CaptureError, open_capture

    try:
        capture = open_capture(options.tensor_dir, run=options.run)
    except CaptureError as error:
        return _complain(str(error), USAGE)
    try:
        return _draw(capture, options)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)


def _draw(capture: Capture, options: argparse.Namespace) -> int:
    from megatron.quantscope.analysis.workers import default_workers
    from megatron.quantscope.report import numbers
    from megatron.quantscope.report.draw import DrawError, draw, figures_for
    from megatron.quantscope.report.progress import Progress

    start = time.perf_counter()
    try:
        drawn = draw(
            capture,
            options.output_dir,
            workers=options.max_workers or default_workers(),
            figures=figures_for(quick=options.quick, only=options.only),
            progress=Progress(),
        )
    except DrawError as error:
        return _complain(str(error), FAILED)
    seconds = time.perf_counter() - start
    written = len(drawn.figures.written)
    print(f"{drawn.files} tensor files ({numbers.size(drawn.bytes)}) read, {written} figures drawn in {seconds:.1f} s")
    code = DONE
    if drawn.problems:
        count, listing = len(drawn.problems), Path(options.output_dir) / "tensor_stats.txt"
        message = f"{count} problems in {options.tensor_dir}, listed in {listing}; the first: {drawn.problems[0]}"
        code = _complain(message, FAILED)
    if drawn.figures.failed:
        code = _complain(f"{len(drawn.figures.failed)} figures could not be drawn", FAILED)
    print(drawn.open_first)
    return code


def _complain(message: str, code: int) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code) if code == INTERRUPTED else sys.exit(code)
