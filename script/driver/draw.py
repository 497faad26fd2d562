"""run_tensor_draw.sh: draw the tensors of a capture; collect them first if asked to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from script.driver import collection
from script.driver.environment import ROOT
from script.driver.inputs import BadInput
from script.driver.options import DRAW, Options
from script.driver.preparation import Given
from script.driver.program import run_program

if TYPE_CHECKING:
    from script.driver.display import Display

VISUALIZER = ROOT / "script" / "visualization" / "tensor_visualizer.py"
VISUALIZE, COLLECT, BOTH = DRAW.mode_names
WAIT_SECONDS = 0.5
DRY_RUN = "--tensor-dry-run"  # of the trainer


def check(options: Options) -> Given | None:
    """Check what can be checked before anything is set up.

    Returns:
        What the paths of a collection hold; None when nothing is to be collected.

    Raises:
        BadInput: One line for the first thing that is wrong.
    """
    if options.mode == BOTH and DRY_RUN in options.passed_on:
        raise BadInput(f"both draws what it collects, and {DRY_RUN} collects nothing: use collect")
    if options.mode != VISUALIZE:
        return collection.check(_collecting(options))
    _capture(options)
    return None


def draw(options: Options, given: Given | None, display: Display) -> int:
    """Do what the mode says; what could not be collected is not drawn.

    Returns:
        The exit code.
    """
    if given is not None:
        exit_code = collection.collect(_collecting(options), given, display)
        if exit_code or options.mode == COLLECT:
            return exit_code
    return _visualize(options)


def _collecting(options: Options) -> Options:
    return replace(options, mode=collection.SINGLE)


def _capture(options: Options) -> Path:
    """The directory to draw: the whole capture, or one type of it.

    Raises:
        BadInput: It is not there.
    """
    if not options.tensor_dir.is_dir():
        raise BadInput(f"--tensor-dir: {options.tensor_dir} does not exist; run_tensor_draw.sh both collects and draws")
    if options.mode != VISUALIZE or options.quant_type is None:
        return options.tensor_dir
    folder = options.tensor_dir / options.quant_type
    if not folder.is_dir():
        there = sorted(path.name for path in options.tensor_dir.iterdir() if path.is_dir())
        raise BadInput(f"{options.tensor_dir} has no {options.quant_type}; there: {', '.join(there) or 'nothing'}")
    return folder


def _visualize(options: Options) -> int:
    """Run the visualiser; it prints for itself."""
    from script.driver.process import RunningProgram

    command = [sys.executable, str(VISUALIZER), "--tensor_dir", str(_capture(options))]
    command += ["--output_dir", str(options.output_dir)]
    if options.max_workers is not None:
        command += ["--max_workers", str(options.max_workers)]
    if options.mode == VISUALIZE:
        command += options.passed_on
    with RunningProgram(command) as program:
        while program.lines(WAIT_SECONDS) is not None:
            pass
        return program.returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program with the arguments after its name."""
    return run_program(DRAW, "script.driver.draw", sys.argv[1:] if argv is None else argv, check=check, body=draw)


if __name__ == "__main__":
    sys.exit(main())
