"""How the programs of script/data and script/model answer wrong usage and bad input: one line on stderr, no traceback.

Exit codes: 0 done, 1 failed (bad content, no network, disk), 2 wrong usage, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from megatron.training.failure import TrainingError, UsageError

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130

OWN_LOGGERS = ("script", "__main__")  # a module that is run with python -m is called __main__
UPSTREAM = r"megatron\.core|torch"  # warn at import of what is not installed, which these programs don't need


class InputError(Exception):
    """Input that can not be used; the message is one line that names the thing and what is allowed."""


class Parser(argparse.ArgumentParser):
    """argparse, answering wrong usage with one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message without the usage block, and exit with 2."""
        self.exit(WRONG_USAGE, f"{self.prog}: error: {message} (see --help)\n")


def existing_file(text: str) -> Path:
    """Argument type: a path to a file that is there."""
    path = Path(text).expanduser()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"no such file: {text}")
    return path


def existing_path(text: str) -> Path:
    """Argument type: a path to a file or directory that is there."""
    path = Path(text).expanduser()
    if not path.exists():
        raise argparse.ArgumentTypeError(f"no such file or directory: {text}")
    return path


def positive_int(text: str) -> int:
    """Argument type: a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def non_negative_int(text: str) -> int:
    """Argument type: a whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def run(program: Callable[[], None], name: str) -> int:
    """Run a program's body; failures that the user can act on become one line on stderr.

    Args:
        program: the body; what our own modules log at INFO goes to stderr as plain lines.
        name: the program's name, in front of the line.

    Returns:
        The exit code.
    """
    with _only_own_messages():
        try:
            program()
        except (InputError, UsageError, TrainingError, OSError) as error:
            print(f"{name}: error: {error}", file=sys.stderr)
            return FAILED
        except KeyboardInterrupt:
            print(f"{name}: stopped", file=sys.stderr)
            return INTERRUPTED
    return 0


@contextmanager
def _only_own_messages() -> Iterator[None]:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    loggers = [logging.getLogger(name) for name in OWN_LOGGERS]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=UPSTREAM)
            yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
