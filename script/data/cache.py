"""Where fetched and derived files live, and how they get there: complete, or not at all.

A directory is filled under a temporary name beside its final one and then renamed, so a killed program leaves nothing
that looks finished. Programs that fill the same cache at the same time wait for each other on a file lock, which the
system releases when its holder dies.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.quantscope.cache import cache_dir as cache_dir
from script.data.command_line import InputError

CHUNK_BYTES = 1 << 20
STAGING_SUFFIX = ".tmp"


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock; the directory is made if need be.

    Raises:
        InputError: the directory can not be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / ".lock").open("w")
    except OSError as error:
        raise InputError(
            f"the cache {directory} can not be written ({error.strerror}); set QUANTSCOPE_CACHE to another directory"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def discard_abandoned(target: Path) -> None:
    """Remove what killed programs left of `target` (call under the lock of its directory)."""
    for staging in target.parent.glob(f".{target.name}.*{STAGING_SUFFIX}"):
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """Give a temporary directory beside `target`; on success it becomes `target`, on an error it is removed.

    A `target` that is already there stays whole until the new one is complete, and is replaced then. Who is stopped
    between the two renames finds it in its place again.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=STAGING_SUFFIX, dir=target.parent))
    made, old = staging / "new", staging / "old"
    try:
        made.mkdir()
        yield made
        if target.exists():
            target.rename(old)
        made.rename(target)
    finally:
        if os.path.lexists(old) and not target.exists():
            old.rename(target)  # if that fails too, it is at least not removed
        shutil.rmtree(staging, ignore_errors=True)
