"""Files that are complete or absent, under names that are never reused.

A file is filled under a temporary name that no pattern of captured files matches, then given its own by a hard link,
which fails where the name exists (a rename would replace). File systems without hard links get a check and a rename
instead. A killed process loses no finished file; against a power cut a file is forced to the disk before it gets its
name where that is asked for (`--tensor-fsync`), and else left to the system.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from megatron.quantscope.capture.errors import CaptureError

TEMPORARY_PREFIX = ".writing-"

_PROCESS = secrets.token_hex(4)  # tells hosts that share a directory apart; the pid tells forks apart
_serial = itertools.count()
_NO_HARD_LINKS = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def temporary_for(path: Path) -> Path:
    """A name beside `path` that nothing else has, for a file that is not complete."""
    return path.with_name(f"{TEMPORARY_PREFIX}{_PROCESS}-{os.getpid()}-{next(_serial)}")


def place(path: Path, fill: Callable[[Path], None]) -> int:
    """Make the file `path` with what `fill` writes; leaves nothing behind when that fails.

    Returns:
        The file's size in bytes.

    Raises:
        FileExistsError: when `path` exists; it stays as it was.
        OSError: when it can not be written.
    """
    temporary = temporary_for(path)
    try:
        fill(temporary)
        size = temporary.stat().st_size
        give_name(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return size


def give_name(temporary: Path, path: Path) -> None:
    """Make the complete file `temporary` known as `path`; the temporary name may stay and is the caller's to remove.

    Raises:
        FileExistsError: when `path` exists; it stays as it was.
        OSError: when the name can not be made.
    """
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


def save_tensor_file(file: IO[bytes] | Any, content: Mapping[str, Any]) -> None:
    """`torch.save` into an open file.

    By a path torch would put the temporary name inside the archive, and not say why the system refused a write.

    Raises:
        OSError: with the operating system's reason.
    """
    import torch

    try:
        torch.save(dict(content), file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def skip_zip_checksums() -> None:
    """Have `torch.save` leave out the CRC of its zip records on this thread; every capture has better ones.

    It costs half of writing a file. Where the option is the whole process's, as in older versions of torch, nothing is
    changed: the training's own checkpoints are none of our business.
    """
    import torch

    torch.serialization.set_crc32_options(False)
    if not _of_new_thread(torch.serialization.get_crc32_options):
        torch.serialization.set_crc32_options(True)


def _of_new_thread(ask: Callable[[], bool]) -> bool:
    """What `ask` says on a thread that has set nothing."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    thread.join()
    return answers[0]


class ByteCounter:
    """A file that counts what is written to it, and keeps none of it."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: Any) -> int:
        """Count the bytes of `data`."""
        size = memoryview(data).nbytes
        self.size += size
        return size

    def flush(self) -> None:
        """Nothing waits here."""


def force_to_disk(path: Path) -> None:
    """Return when a file, or the names in a folder, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def force_names_to_disk(folder: Path) -> None:
    """`force_to_disk` of the names in a folder.

    Raises:
        CaptureError: when the system can not promise that.
    """
    try:
        force_to_disk(folder)
    except OSError as error:
        raise CaptureError(f"can not write {folder}: {error.strerror or error}") from error
