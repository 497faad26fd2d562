"""One `DIR/<quant_type>` folder as one rank writes it: the counter of names, and complete files.

Session and saver of a process share one folder object, so that their counters never meet. The counter starts after the
highest number that this rank, or a file of an older form without a rank, has in the folder.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.files import force_to_disk, place, save_tensor_file
from megatron.quantscope.capture.manifest import last_counter, manifest_name
from megatron.quantscope.capture.names import CaptureName, parse_name

RUNS_FOLDER = "runs"


class CaptureFolder:
    """The files of one rank in one type folder; made by `capture_folder`. Safe to use from several threads."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path = path
        self.rank = rank
        self._lock = threading.Lock()
        self._counter: Iterator[int] | None = None

    def next_counter(self) -> int:
        """A number that no file of this rank has yet.

        Raises:
            CaptureError: when the folder can not be read.
        """
        with self._lock:
            if self._counter is None:
                self._counter = itertools.count(self._highest() + 1)
            return next(self._counter)

    def write(self, name: CaptureName, content: Mapping[str, Any], *, fsync: bool = False) -> tuple[Path, int]:
        """Write one file; it is there, complete, when this returns, and with `fsync` on the disk itself.

        Returns:
            Its path and its size in bytes.

        Raises:
            CaptureError: when the name exists or the file can not be written; nothing is left behind.
            CaptureUsageError: for a name that is not allowed.
        """
        path = self.path / name.filename()
        try:
            try:
                return path, place(path, lambda temporary: _fill(temporary, content, fsync))
            except FileNotFoundError:
                self.path.mkdir(parents=True, exist_ok=True)
                return path, place(path, lambda temporary: _fill(temporary, content, fsync))
        except FileExistsError:
            raise CaptureError(
                f"{path} exists and is not overwritten: does another run write as rank {self.rank}?"
            ) from None
        except OSError as error:
            raise CaptureError(f"can not write {path}: {error.strerror or error}") from error

    def _highest(self) -> int:
        try:
            with os.scandir(self.path) as entries:
                names = [parse_name(entry.name) for entry in entries]
            # Rows of segments, and of statistics alone, have no file.
            listed = [last_counter(path) for path in self.path.glob(f"{RUNS_FOLDER}/*/{manifest_name(self.rank)}")]
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise CaptureError(f"can not read {self.path}: {error.strerror or error}") from error
        named = [name.counter for name in names if name and name.rank in (None, self.rank)]
        return max(named + listed, default=0)


def _fill(path: Path, content: Mapping[str, Any], fsync: bool) -> None:
    with open(path, "wb") as file:  # buffered: without, a single write takes no more than 2 GB, and torch does not look
        save_tensor_file(file, content)
    if fsync:
        force_to_disk(path)


_folders: dict[tuple[Path, int], CaptureFolder] = {}
_folders_lock = threading.Lock()


def capture_folder(path: Path, rank: int) -> CaptureFolder:
    """The folder object of `path` and `rank`, one in this process however often it is asked for."""
    key = (Path(os.path.abspath(path)), rank)
    with _folders_lock:
        return _folders.setdefault(key, CaptureFolder(key[0], rank))
