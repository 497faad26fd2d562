"""Write one row: hash, file, statistics, manifest line. Runs on the writers' threads."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.quantscope.capture.config import BYTES_PER_GB
from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.folder import CaptureFolder
from megatron.quantscope.capture.manifest import ManifestWriter
from megatron.quantscope.capture.metadata import TensorMetadata
from megatron.quantscope.capture.names import CaptureName
from megatron.quantscope.capture.plain import to_json
from megatron.quantscope.capture.snapshot import checksum, size_of

if TYPE_CHECKING:
    import torch

# What torch.save adds to a tensor's bytes: zip records and their alignment, and the pickled metadata, which is never
# larger than this many times its JSON. Only the budget needs it, before a file's true size is known.
_FILE_OVERHEAD = 8192
_PICKLE_TO_JSON = 2


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file that is on disk, as manifest rows describe it."""

    file: str
    bytes: int
    checksum: str
    statistics: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor on its way to disk.

    Attributes:
        tensor: A copy that nobody else holds.
        metadata: All of it.
        name: File name, in case the row gets a file of its own.
        earlier: The row before of the same weight in the same optimizer step; when its content is the same, this row
            refers to its file.
        stored: Tells a later row what became of this one.
    """

    tensor: torch.Tensor
    metadata: TensorMetadata
    name: CaptureName
    earlier: Future[StoredFile] | None
    stored: Future[StoredFile]


class RowStore:
    """Writes rows as `pt` files of one folder and lines of one manifest. Safe to use from several threads.

    Args:
        folder: Where files go.
        manifest: Where lines go.
        budget_bytes: Bytes that the files may take together.
    """

    def __init__(self, folder: CaptureFolder, manifest: ManifestWriter, budget_bytes: int) -> None:
        self._folder = folder
        self._manifest = manifest
        self._budget = budget_bytes
        self._spent = 0
        self._lock = threading.Lock()

    def write(self, row: Row) -> int | None:
        """Write one row; file and line are there when this returns.

        Returns:
            The size of its file; None for a row that refers to an earlier file.

        Raises:
            CaptureError: when it can not be written, or the budget is spent.
        """
        metadata = row.metadata.to_dict()
        fingerprint = checksum(row.tensor)
        stored = row.earlier.result() if row.earlier else None  # its task started before this one: it will end
        reference = stored is not None and stored.checksum == fingerprint
        if stored is None or not reference:
            stored = self._write_file(row, metadata, fingerprint)
        row.stored.set_result(stored)
        line = {"file": stored.file, "bytes": stored.bytes, "checksum": fingerprint, "reference": reference}
        self._manifest.append(
            "tensor", line | {"counter": row.name.counter} | metadata | {"statistics": stored.statistics}
        )
        return None if reference else stored.bytes

    def _write_file(self, row: Row, metadata: dict[str, Any], fingerprint: str) -> StoredFile:
        estimate = size_of(row.tensor) + _FILE_OVERHEAD + _PICKLE_TO_JSON * len(to_json(metadata))
        self._spend(estimate)
        path, size = self._folder.write(row.name, {"tensor": row.tensor, "metadata": metadata})
        with self._lock:
            self._spent += size - estimate
        return StoredFile(file=path.name, bytes=size, checksum=fingerprint, statistics=_statistics(row.tensor))

    def _spend(self, size: int) -> None:
        with self._lock:
            if self._spent + size > self._budget:
                raise CaptureError(
                    f"the budget of {self._budget / BYTES_PER_GB:g} GB a rank is spent; raise --tensor-budget-gb"
                )
            self._spent += size


def _statistics(tensor: torch.Tensor) -> dict[str, Any] | None:
    """The tensor's statistics; None for a dtype without real values."""
    from megatron.quantscope.formats.measuring import measure

    try:
        return measure(tensor).to_json()
    except TypeError:
        return None
