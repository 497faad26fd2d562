"""One self-contained file a row: what `glob` and `find` see, and `torch.load` alone can read.

Only a weight is written once: it is shown by its forward and by its backward, for every micro-batch. Its rows of one
optimizer step form a chain: each waits for the one before and refers to its file when the content is the same. So a
weight that is written over in between, even through `.data`, gets a file of its own, and the others cost a hash.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.quantscope.capture.budget import Budget
from megatron.quantscope.capture.files import ByteCounter, force_names_to_disk, save_tensor_file
from megatron.quantscope.capture.folder import CaptureFolder
from megatron.quantscope.capture.names import CaptureName
from megatron.quantscope.capture.plain import to_json
from megatron.quantscope.capture.snapshot import size_of

if TYPE_CHECKING:
    import torch

# What torch.save adds to a tensor's bytes: zip records and their alignment, and the pickled metadata, which is never
# larger than this many times its JSON. Only the budget needs it, before a file's true size is known.
_FILE_OVERHEAD = 8192
_PICKLE_TO_JSON = 2
WRITTEN_ONCE = "weight"  # the tensor whose rows of one optimizer step share a file


@dataclass(frozen=True)
class StoredFile:
    """A file that is on disk, and what it holds."""

    file: str
    bytes: int
    fingerprint: str


@dataclass(frozen=True)
class Link:
    """A row's place in a weight's chain.

    Attributes:
        earlier: What became of the row before; None: there is none.
        stored: Tells the next row what became of this one.
    """

    earlier: Future[StoredFile] | None
    stored: Future[StoredFile]


class WeightChains:
    """Links the rows of each weight in each optimizer step; belongs to the training thread."""

    def __init__(self) -> None:
        self._last: dict[str | None, tuple[int | None, Future[StoredFile]]] = {}

    def link(self, module: str | None, iteration: int | None, tensor_name: str) -> Link | None:
        """The place of a row that is about to be handed over; None: it is no weight's."""
        if tensor_name != WRITTEN_ONCE:
            return None
        before, earlier = self._last.get(module, (None, None))
        stored: Future[StoredFile] = Future()
        self._last[module] = (iteration, stored)
        return Link(earlier if before == iteration else None, stored)


class PtStore:
    """Writes `pt` files of one folder. Safe to use from several threads.

    Args:
        folder: Where they go.
        budget: What their bytes are taken from.
        fsync: Force each to the disk before it gets its name.
        dry: Count, and touch no disk.
    """

    def __init__(self, folder: CaptureFolder, budget: Budget, *, fsync: bool = False, dry: bool = False) -> None:
        self._folder = folder
        self._budget = budget
        self._fsync = fsync
        self._dry = dry

    def put(
        self, tensor: torch.Tensor, metadata: dict[str, Any], name: CaptureName, fingerprint: str, link: Link | None
    ) -> tuple[StoredFile, bool]:
        """Write a row's file, unless the row before of the same weight wrote the same.

        Returns:
            The file, and whether it is that row's.

        Raises:
            CaptureError: when it can not be written, or the budget is spent.
        """
        earlier = link.earlier.result() if link and link.earlier else None  # its task began first: it will end
        if earlier is not None and earlier.fingerprint == fingerprint:
            stored = earlier
        else:
            stored = self._write(tensor, metadata, name, fingerprint)
        if link is not None:
            link.stored.set_result(stored)
        return stored, stored is earlier

    def force_to_disk(self) -> None:
        """Return when the names of all files would survive a power cut.

        Raises:
            CaptureError: when the system can not promise that.
        """
        force_names_to_disk(self._folder.path)

    def _write(self, tensor: torch.Tensor, metadata: dict[str, Any], name: CaptureName, fingerprint: str) -> StoredFile:
        estimate = size_of(tensor) + _FILE_OVERHEAD + _PICKLE_TO_JSON * len(to_json(metadata))
        self._budget.spend(estimate)
        content = {"tensor": tensor, "metadata": metadata}
        if self._dry:
            counter = ByteCounter()
            save_tensor_file(counter, content)
            path, size = Path(name.filename()), counter.size
        else:
            path, size = self._folder.write(name, content, fsync=self._fsync)
        self._budget.spend(size - estimate)
        return StoredFile(path.name, size, fingerprint)
