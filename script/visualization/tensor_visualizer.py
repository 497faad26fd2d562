#!/usr/bin/env python3
"""See what a tensor capture holds and what number formats do to it: a report, figures, tables, from one command.

    python script/visualization/tensor_visualizer.py --tensor_dir ./enhanced_tensor_logs --output_dir ./draw
    python script/visualization/tensor_visualizer.py compare bf16_run/ mxfp8_run/

README.md beside this file says what comes out, and `--help` which other commands there are. Exit code 0: all was read
and drawn; 1: something was not, the last lines say what; 2: wrong usage.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # run as a file: the repository is what is imported from, whatever the current directory
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.report.commands.opening import FAILED, INTERRUPTED, USAGE, complain, start_logging
from megatron.quantscope.report.commands.parser import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code.
    """
    options = parse(sys.argv[1:] if arguments is None else arguments)
    start_logging(options)
    try:
        return options.command.function()(options)
    except CaptureError as error:
        return complain(str(error), USAGE)
    except BrokenPipeError:  # `... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return complain("interrupted", INTERRUPTED)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code) if code == INTERRUPTED else sys.exit(code)
