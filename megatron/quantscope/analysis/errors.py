"""What ends an analysis, and how it is told: one line that says what is wrong, and with which file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path


class AnalysisError(Exception):
    """An analysis can not go on; the message is one line for the user."""


@contextmanager
def told_in_one_line(target: Path | None, workers: int) -> Iterator[None]:
    """What an analysis can not go on from, as an `AnalysisError`: files, connections and processes that fail.

    Args:
        target: Where it writes; None: nowhere.
        workers: How many processes it has.
    """
    try:
        yield
    except BrokenProcessPool:
        raise AnalysisError(f"a worker was killed, most likely for want of memory: try fewer than {workers}") from None
    except OSError as error:
        raise AnalysisError(_told(error, target)) from error


def printable(text: str) -> str:
    """A text that UTF-8 can hold: bytes of a file's name that are none appear as escapes."""
    return text.encode(errors="backslashreplace").decode()


def _told(error: OSError, target: Path | None) -> str:
    reason = (error.strerror or str(error) or type(error).__name__).partition("\n")[0]
    if error.errno is None:  # not the system's: a connection of Dask's that ended, a table that pyarrow can not read
        return printable(f"it broke off: {type(error).__name__}: {reason}")
    if error.filename is None:  # of an open file, and what fails late is writing: the disk is full
        return f"can not write {target}: {reason}" if target is not None else reason
    path = Path(os.fsdecode(error.filename))
    return printable(f"can not {'write' if _holds(target, path) else 'read'} {path}: {reason}")


def _holds(target: Path | None, path: Path) -> bool:
    """Whether a path lies in the target, or has to be made for it."""
    return target is not None and (path.is_relative_to(target) or target.is_relative_to(path))
