"""What both programs share: from a command line to an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage, 128 + N stopped by signal N. What goes wrong is one line on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from script.data.command_line import FAILED, INTERRUPTED, WRONG_USAGE, InputError
from script.driver import environment
from script.driver.inputs import BadInput
from script.driver.options import Options, Program, parse

if TYPE_CHECKING:
    from script.driver.display import Display

Checked = TypeVar("Checked")


def run_program(
    program: Program,
    module: str,
    argv: Sequence[str],
    *,
    check: Callable[[Options], Checked],
    body: Callable[[Options, Checked, Display], int],
) -> int:
    """Run one of the programs and return its exit code.

    Args:
        program: Which one.
        module: Its module, to start it again inside the environment.
        argv: Its arguments.
        check: Looks at the options with the standard library alone, before anything is set up.
        body: Does the work inside the environment, with what `check` found.
    """
    options = parse(program, argv)
    try:
        checked = check(options)
        environment.enter(module, argv)
        return _inside(program, lambda display: body(options, checked, display))
    except BadInput as error:
        return _refuse(program, f"{error} (see --help)", WRONG_USAGE)
    except (InputError, OSError) as error:
        return _refuse(program, str(error), FAILED)
    except KeyboardInterrupt:  # during the set-up; later it is Interrupted
        return _refuse(program, "stopped", INTERRUPTED)


def _inside(program: Program, body: Callable[[Display], int]) -> int:
    """Run `body` where the packages are; a stop signal ends what it started."""
    from script.driver.display import Display
    from script.driver.process import Interrupted, stop_signals_raise

    try:
        with stop_signals_raise():
            return body(Display())
    except Interrupted as interrupted:
        print(f"{program.name}: stopped by {interrupted}; what was collected is kept", file=sys.stderr)
        return interrupted.exit_code


def _refuse(program: Program, message: str, exit_code: int) -> int:
    print(f"{program.name}: error: {message}", file=sys.stderr)
    return exit_code
