"""The manifest: one JSON line a kept tensor, one a finished iteration, appended while the run goes on.

    {"schema": 1, "kind": "tensor", "file": NAME, "bytes": N, "checksum": "sha256:...", "reference": false,
     "counter": N, <all metadata>, "statistics": {...}}
    {"schema": 1, "kind": "commit", "iteration": N, "rows": N, "files": N, "bytes": N, "scalars": {"lm loss": ...}}
    {"schema": 1, "kind": "stopped", "reason": "..."}         collecting ended early
    {"schema": 1, "kind": "closed", "rows": N, "files": N, "bytes": N}       the run ended in good order

`bytes` of a tensor row is the size of its file. A row with `reference: true` wrote no file: `file` is the one that
holds the same content. A commit counts its iteration's rows, and the files and bytes they added; it is written when
every file of the iteration is on disk, so that rows without a commit mark an iteration that is not complete.
A line is appended by one write and taken back when that write comes to nothing halfway, so lines are complete too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.plain import to_json

SCHEMA = 1


def manifest_path(run_folder: Path, rank: int) -> Path:
    """The manifest of one rank of one run."""
    return run_folder / f"manifest_rank{rank}.jsonl"


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
        line = (to_json({"schema": SCHEMA, "kind": kind, **fields}) + "\n").encode()
        with self._lock:
            end = self._file.tell()
            try:
                written = self._file.write(line)
                if written != len(line):  # a full disk takes a part; the rest tells why
                    self._file.write(line[written:])
            except OSError as error:
                os.ftruncate(self._file.fileno(), end)
                self._file.seek(end)
                raise CaptureError(f"can not write {self.path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()
