"""The writing half of a session: takes tensors from the training thread and sees to it that they reach the disk.

    training thread   keep: reserve bytes -> copy -> name -> hand over            (waits for room, never for the disk)
    writer threads    hash -> file or reference -> statistics -> manifest line    (RowStore)
    the last of them  commit record of the iteration                              (IterationLedger)

A weight is shown by its forward and by its backward, for every micro-batch. Its rows of one optimizer step form a
chain: each waits for the one before and refers to its file when the content hash is the same. So a weight that is
written over in between, even through `.data`, gets a file of its own, and the others cost a hash and no file.

The first thing that goes wrong ends collecting: one message, nothing more is written, and what was is readable.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.capture.coordinates import STAMP_FORMAT
from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.folder import RUNS_FOLDER, capture_folder
from megatron.quantscope.capture.ledger import IterationLedger, Tally
from megatron.quantscope.capture.manifest import ManifestWriter, manifest_path
from megatron.quantscope.capture.metadata import SAVE_TIME_FORMAT, TensorMetadata
from megatron.quantscope.capture.names import CaptureName
from megatron.quantscope.capture.rows import Row, RowStore, StoredFile
from megatron.quantscope.capture.run_record import remove_run_record
from megatron.quantscope.capture.snapshot import size_of, snapshot
from megatron.quantscope.capture.writer import BackgroundWriter

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_WRITTEN_ONCE = "weight"  # the tensor whose rows of one optimizer step share a file


@dataclass(frozen=True, kw_only=True)
class SinkSettings:
    """Where a sink writes, and within which bounds.

    Attributes:
        folder: The type folder, `DIR/<quant_type>`.
        run_id: The run; its folder must exist.
        rank: Global rank.
        budget_bytes: Bytes that this rank's files may take.
        host_memory_bytes: Bytes of copies that may wait.
        outcome: What the training does when collecting ends early, for the message.
    """

    folder: Path
    run_id: str
    rank: int
    budget_bytes: int
    host_memory_bytes: int
    outcome: str


class TensorSink:
    """Keeps the tensors of one rank of one run. `keep` and `end_iteration` belong to the training thread.

    Raises:
        CaptureError: when the manifest can not be made.
    """

    def __init__(self, settings: SinkSettings) -> None:
        self.failed: str | None = None
        self.copy_seconds = 0.0
        self._settings = settings
        self._folder = capture_folder(settings.folder, settings.rank)
        self._manifest = ManifestWriter(manifest_path(settings.folder / RUNS_FOLDER / settings.run_id, settings.rank))
        self._store = RowStore(self._folder, self._manifest, settings.budget_bytes)
        self._ledger = IterationLedger(lambda fields: self._manifest.append("commit", fields))
        self._writer = BackgroundWriter(settings.host_memory_bytes, self.fail)
        self._weights: dict[tuple[str | None, str], tuple[int | None, Future[StoredFile]]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def keep(self, tensor: torch.Tensor, metadata: TensorMetadata, iteration: int) -> None:
        """Copy `tensor` and hand it over; never raises, since training has to go on."""
        if self.failed:
            return
        size = size_of(tensor)
        self._writer.reserve(size)
        try:
            row = self._row(tensor, metadata)
            self._ledger.handed_over(iteration)
        except Exception as error:
            self._writer.release(size)
            self.fail(error)
            return
        self._writer.submit(size, lambda: self._write(row, iteration))

    def end_iteration(self, iteration: int, scalars: Mapping[str, float]) -> None:
        """No tensor of `iteration` follows; its commit record is written when its last file is on disk."""
        if self.failed:
            return
        try:
            self._ledger.ended(iteration, scalars)
        except CaptureError as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End collecting, with one message however often it is called."""
        with self._lock:
            if self.failed:
                return
            self.failed = str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"
        log.error("collecting tensors ended early: %s (%s)", self.failed, self._settings.outcome)
        log.debug("where it went wrong", exc_info=error)
        self._note("stopped", {"reason": self.failed})

    def close(self) -> None:
        """Wait until everything that was handed over is on disk; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        if not self.failed:
            self._note("closed", vars(self._ledger.total))
        self._manifest.close()
        if self._ledger.untouched and not self.failed:  # the training never began
            self._manifest.path.unlink()
            remove_run_record(self._manifest.path.parent)

    @property
    def total(self) -> Tally:
        """What is on disk by now."""
        return replace(self._ledger.total)

    @property
    def committed(self) -> int:
        """Iterations that are complete on disk."""
        return self._ledger.committed

    @property
    def waited_seconds(self) -> float:
        """How long the training thread has waited for room."""
        return self._writer.waited_seconds

    def _row(self, tensor: torch.Tensor, metadata: TensorMetadata) -> Row:
        start = time.perf_counter()
        copy = snapshot(tensor)
        self.copy_seconds += time.perf_counter() - start
        now = datetime.now()
        metadata = replace(
            metadata,
            shape=tuple(copy.shape),
            dtype=str(copy.dtype).removeprefix("torch."),
            save_time=now.strftime(SAVE_TIME_FORMAT),
        )
        name = name_of(metadata, self._folder.next_counter(), now)
        stored: Future[StoredFile] = Future()
        return Row(tensor=copy, metadata=metadata, name=name, earlier=self._chain(metadata, stored), stored=stored)

    def _chain(self, metadata: TensorMetadata, stored: Future[StoredFile]) -> Future[StoredFile] | None:
        """The row before of the same weight in the same optimizer step, and `stored` as the next one's."""
        if metadata.tensor_name != _WRITTEN_ONCE:
            return None
        key = (metadata.module, metadata.tensor_name)
        iteration, earlier = self._weights.get(key, (None, None))
        self._weights[key] = (metadata.iteration, stored)
        return earlier if iteration == metadata.iteration else None

    def _write(self, row: Row, iteration: int) -> None:
        try:
            if not self.failed:
                self._ledger.on_disk(iteration, self._store.write(row))
        finally:
            row.stored.cancel()  # a later row of the chain must not wait for one that came to nothing

    def _note(self, kind: str, fields: Mapping[str, object]) -> None:
        """Append a line that nothing depends on."""
        try:
            self._manifest.append(kind, fields)
        except (CaptureError, ValueError) as error:  # ValueError: the session was closed meanwhile
            log.debug("no %r line in the manifest: %s", kind, error)


def name_of(metadata: TensorMetadata, counter: int, now: datetime) -> CaptureName:
    """The file name that belongs to `metadata`."""
    return CaptureName(
        stamp=now.strftime(STAMP_FORMAT),
        counter=counter,
        iteration=metadata.iteration,
        layer_type=metadata.layer_type,
        layer_idx=metadata.layer_idx,
        operation=metadata.operation,
        phase=metadata.phase,
        component=metadata.component,
        quant_type=metadata.quant_type,
        rank=metadata.rank,
        sample_idx=metadata.sample_idx,
        tensor_name=metadata.tensor_name,
    )
