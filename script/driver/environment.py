"""Going over to the Python environment that script/setup_env.sh names, making it on the first run.

The command line is read by whatever Python is there; everything after that needs packages. So the driver asks
setup_env.sh, and starts itself again under that interpreter unless it already runs there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SET_UP = ROOT / "script" / "setup_env.sh"
INTERPRETER_VARIABLE = "QUANTSCOPE_INTERPRETER"  # set for the second start, and for every process below


def enter(module: str, argv: Sequence[str]) -> None:
    """Return inside the environment; ends the program with setup_env.sh's exit code if there can be none.

    Args:
        module: The program's own module, to start again.
        argv: Its arguments.
    """
    if os.environ.get(INTERPRETER_VARIABLE) == sys.executable:
        return
    done = subprocess.run([str(SET_UP)], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    interpreter = done.stdout.strip()
    already_there = interpreter in (sys.executable, os.environ.get(INTERPRETER_VARIABLE))
    os.environ[INTERPRETER_VARIABLE] = interpreter
    if not already_there:
        os.execv(interpreter, [interpreter, "-m", module, *argv])
