"""From the script's path to its end: flags checked, megatron.core laid over, theirs wrapped, run, capture closed."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import time
from pathlib import Path

from megatron.quantscope.capture import CaptureError, CaptureUsageError
from script.stock import cpu
from script.stock.flags import UsageError, checked
from script.stock.hooks import Instruments

PROGRAM = "instrument.py"
DONE, FAILED, WRONG_USAGE = 0, 1, 2
GRACE_S = 1.0  # torchrun ends all ranks when one has left: the first, which does the talking, must not be ended early


def run(script: Path) -> int:
    """Run `script` as the main program, with `sys.argv` its own; returns the exit code.

    What the script raises goes through as it is: its traceback is the user's.
    """
    try:
        recipe, capture = checked(sys.argv[1:])
        cpu.install()
        _lay_over()
        instruments = Instruments(recipe, capture)
        instruments.install()
    except UsageError as error:
        return _complain(error, WRONG_USAGE)
    try:
        runpy.run_path(str(script), run_name="__main__")
        instruments.close()
    except SystemExit as end:
        if not _is_success(end):
            raise
        instruments.close()
    except (CaptureUsageError, UsageError) as error:
        return _complain(error, WRONG_USAGE)
    except CaptureError as error:
        return _complain(error, FAILED)
    except ModuleNotFoundError as error:
        line = importlib.import_module("megatron.core.dataset_helpers").how_to_compile(error)
        if line is None:
            raise
        return _complain(UsageError(line), WRONG_USAGE)
    return DONE


def _lay_over() -> None:
    """Import megatron.core and Megatron-LM's trainer.

    Raises:
        UsageError: when either is missing, of a version that is not supported, or lacks a package that it needs.
    """
    try:
        importlib.import_module("megatron.core")
        cpu.install_core()
        importlib.import_module("megatron.training.training")
    except ModuleNotFoundError as error:
        raise UsageError(_missing(error)) from None
    except ImportError as error:
        raise UsageError(str(error)) from None
    cpu.install_trainer()


def _missing(error: ModuleNotFoundError) -> str:
    if (error.name or "").startswith("megatron"):
        return (
            f"no {error.name} beside the script: give the pretrain_gpt.py of a Megatron-LM checkout, or put the "
            "checkout on PYTHONPATH"
        )
    return f"Megatron-LM needs the package {error.name}, which is not installed: pip install {error.name}"


def _is_success(end: SystemExit) -> bool:
    return end.code in (None, DONE)


def _complain(error: Exception, code: int) -> int:
    """One line an error on stderr, from the first rank; returns `code`."""
    if os.environ.get("RANK", "0") == "0":
        for line in str(error).splitlines():
            print(f"{PROGRAM}: error: {line}", file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE_S)
    return code
