"""The manifest: one JSON line a kept tensor, one a finished iteration, appended while the run goes on.

    {"schema": 2, "kind": "tensor", "store": "pt", "file": NAME, "offset": null, "bytes": N,
     "checksum": "xxh3_128:...", "reference": false, "counter": N, <all metadata>, "statistics": {...}, "blocks": null}
    {"schema": 2, "kind": "segment", "iteration": N, "file": NAME, "bytes": N}
    {"schema": 2, "kind": "commit", "iteration": N, "rows": N, "files": N, "bytes": N, "scalars": {"lm loss": ...}}
    {"schema": 2, "kind": "stopped", "reason": "..."}         collecting ended early
    {"schema": 2, "kind": "closed", "rows": N, "files": N, "bytes": N}       the run ended in good order

| `store` | where the tensor is | `file` | `offset` | `bytes` |
|---|---|---|---|---|
| pt | a file of its own in the type folder | its name | null | its size |
| segment | among others in a file of the run folder | that file's name | of the elements in it | of the elements |
| none | nowhere: its statistics were asked for | null | null | 0 |

A row with `reference: true` wrote no bytes: it names those of an earlier row with the same content. `blocks` says where
the map of block exponents is, `{"file", "offset", "shape", "size", "counts"}`, in statistics mode. A commit counts its
iteration's rows and the files and bytes they added; it is written when all of them are on disk, so that rows without a
commit mark an iteration that is not complete. Iterations are committed in their order, so what a row of a committed
iteration refers to is committed too. A line is appended by one write and taken back when that write comes to nothing
halfway, so lines are complete or absent.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.plain import to_json

SCHEMA = 2
_TAIL_BYTES = 1 << 18  # a hundred rows
_COUNTER = re.compile(rb'"counter": (\d+)')


def last_counter(path: Path) -> int:
    """The highest counter among the last rows of a manifest, which are in order but for what two threads overtake.

    Raises:
        OSError: when it can not be read.
    """
    with open(path, "rb") as file:
        size, tail = os.path.getsize(path), _TAIL_BYTES
        while True:
            file.seek(max(0, size - tail))
            counters = _COUNTER.findall(file.read())
            if counters or tail >= size:
                return max(map(int, counters), default=0)
            tail *= 2


def line_of(kind: str, fields: Mapping[str, Any]) -> str:
    """One line of a manifest, with its end."""
    return to_json({"schema": SCHEMA, "kind": kind, **fields}) + "\n"


def manifest_path(run_folder: Path, rank: int) -> Path:
    """The manifest of one rank of one run."""
    return run_folder / manifest_name(rank)


def manifest_name(rank: int) -> str:
    """The file name of a rank's manifest."""
    return f"manifest_rank{rank}.jsonl"


class ManifestWriter:
    """Appends lines to a new manifest. Safe to use from several threads.

    Raises:
        CaptureError: when the file exists or can not be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            self._file = open(path, "xb", buffering=0)  # noqa: SIM115  # open as long as the session is
        except OSError as error:
            raise CaptureError(f"can not make {path}: {error.strerror or error}") from error

    def append(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Append one line.

        Raises:
            CaptureError: when it can not be written; the manifest then ends with the line before.
        """
        self.append_lines([line_of(kind, fields)])

    def append_lines(self, lines: Sequence[str]) -> None:
        """Append lines that `line_of` made, all or none of them.

        Raises:
            CaptureError: as in `append`.
        """
        line = "".join(lines).encode()
        with self._lock:
            end = self._file.tell()
            try:
                while line:  # a full disk takes a part; the rest tells why
                    line = line[self._file.write(line) :]
            except OSError as error:
                os.ftruncate(self._file.fileno(), end)
                self._file.seek(end)
                raise CaptureError(f"can not write {self.path}: {error.strerror or error}") from error

    def force_to_disk(self) -> None:
        """Return when every line would survive a power cut.

        Raises:
            CaptureError: when the system can not promise that.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise CaptureError(f"can not write {self.path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()
