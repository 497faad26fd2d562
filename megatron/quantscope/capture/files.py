"""Files that are complete or absent, under names that are never reused.

A file is filled under a temporary name that no `*.pt` pattern matches, then given its own by a hard link, which fails
where the name exists (a rename would replace). File systems without hard links get a check and a rename instead.
Nothing is fsynced: a killed process loses no finished file, a power cut may.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TEMPORARY_PREFIX = ".writing-"

_PROCESS = secrets.token_hex(4)  # tells hosts that share a directory apart; the pid tells forks apart
_serial = itertools.count()
_NO_HARD_LINKS = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def place(path: Path, fill: Callable[[Path], None]) -> int:
    """Make the file `path` with what `fill` writes; leaves nothing behind when that fails.

    Returns:
        The file's size in bytes.

    Raises:
        FileExistsError: when `path` exists; it stays as it was.
        OSError: when it can not be written.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{_PROCESS}-{os.getpid()}-{next(_serial)}")
    try:
        fill(temporary)
        size = temporary.stat().st_size
        _give_name(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return size


def save_tensor_file(path: Path, content: Mapping[str, Any]) -> None:
    """`torch.save` straight to `path`, which is its fastest way.

    torch's own file writer does not say why it failed; writing once more through a Python file does.

    Raises:
        OSError: with the operating system's reason.
    """
    import torch

    try:
        torch.save(dict(content), os.fspath(path))
    except RuntimeError:
        with open(path, "wb") as file:
            try:
                torch.save(dict(content), file)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise


def _give_name(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.rename(temporary, path)
