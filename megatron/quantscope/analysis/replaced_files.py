"""Files of an output directory: each is complete or absent, and takes the place of the one that was there.

A capture's files are never replaced; those have their own way (`capture.files`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MARK = ".writing-"


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Gives the name under which to write; what is there at the end becomes `path`. Nothing is left on an error.

    Raises:
        OSError: when the file can not be given its name.
    """
    temporary = path.with_name(f".{path.name}{_MARK}{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def unfinished(folder: Path, suffix: str) -> Iterator[Path]:
    """What is being written there, or was when its process was killed, of files that end in `suffix`."""
    return folder.glob(f".*{suffix}{_MARK}*")
