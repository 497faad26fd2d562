"""The writing half of a session: takes tensors from the training thread and sees to it that they reach the disk.

    training thread   keep: room in the arena -> copy -> hand over                (waits for room, never for the disk)
    writer threads    hash -> file, segment or reference -> statistics -> line    (RowWriter)
    the last of them  segments and commit record of the iteration                 (IterationLedger)

What a mode or a format of `--tensor-save-mode` and `--tensor-save-format` needs of these parts is decided once, in
`TensorSink.__init__`. A dry run is the same with a disk that only counts.

The first thing that goes wrong ends collecting: one message, nothing more is written, and what was is readable.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.quantscope.capture.arena import HostArena
from megatron.quantscope.capture.budget import Budget
from megatron.quantscope.capture.config import CaptureConfig
from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.files import force_names_to_disk
from megatron.quantscope.capture.folder import RUNS_FOLDER, capture_folder
from megatron.quantscope.capture.ledger import IterationLedger, Tally
from megatron.quantscope.capture.listener import Listening, RowListener
from megatron.quantscope.capture.manifest import ManifestWriter, manifest_path
from megatron.quantscope.capture.pt_store import PtStore, WeightChains
from megatron.quantscope.capture.record import PT
from megatron.quantscope.capture.rows import BLOCK, Row, RowWriter
from megatron.quantscope.capture.run_record import remove_run_record
from megatron.quantscope.capture.segments import Segments
from megatron.quantscope.capture.site import Shown
from megatron.quantscope.capture.snapshot import Snapshots
from megatron.quantscope.capture.statistics_intake import StatisticsIntake
from megatron.quantscope.capture.writer import BackgroundWriter

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_FOLDERS_OF_A_RUN = 4  # DIR/<quant_type>/runs/<run_id>: whose names a power cut must not take
_ROWS_A_SITE = 9  # at most, a micro-batch: an attention's, with its probabilities
_MEASURED_BATCH = 32  # rows without a copy that are handed over at once: waking a thread costs more than one row
_MEASURED_BYTES = 8192  # what a row without a copy takes until it is written, beside its map of block exponents


@dataclass(frozen=True, kw_only=True)
class SinkSettings:
    """Where a sink writes, and within which bounds.

    Attributes:
        config: What is kept, and how.
        folder: The type folder, `DIR/<quant_type>`.
        run_id: The run; its folder must exist.
        rank: Global rank.
        budget_bytes: Bytes that this rank's files may take.
        outcome: What the training does when collecting ends early, for the message.
    """

    config: CaptureConfig
    folder: Path
    run_id: str
    rank: int
    budget_bytes: int
    outcome: str


class TensorSink:
    """Keeps the tensors of one rank of one run. `keep` and `end_iteration` belong to the training thread.

    Raises:
        CaptureError: when the manifest can not be made.
    """

    def __init__(self, settings: SinkSettings) -> None:
        config = settings.config
        self.failed: str | None = None
        self.copy_seconds = 0.0
        self.sites = 0  # modules that will show tensors: what an iteration's segment is laid out for
        self._settings = settings
        self._folder = capture_folder(settings.folder, settings.rank)
        self._manifest: ManifestWriter | None = None
        if not config.dry_run:
            self._manifest = ManifestWriter(
                manifest_path(settings.folder / RUNS_FOLDER / settings.run_id, settings.rank)
            )
            if config.fsync:
                for folder in list(self._manifest.path.parents)[:_FOLDERS_OF_A_RUN]:
                    force_names_to_disk(folder)
        self._arena = HostArena(config.host_memory_bytes)
        self._snapshots = Snapshots(self._arena)
        self._statistics = StatisticsIntake(config.host_memory_bytes)
        self._intake = self._copied if config.keeps_tensors else self._measured
        self._batch = 1 if config.keeps_tensors else _MEASURED_BATCH
        budget = Budget(settings.budget_bytes)
        in_files = config.keeps_tensors and config.save_format == PT
        self._segments = None if in_files and not config.keeps_blocks else self._make_segments(budget)
        self._chains = WeightChains() if in_files else None
        self._rows = RowWriter(
            manifest=self._manifest,
            files=PtStore(self._folder, budget, fsync=config.fsync, dry=config.dry_run) if in_files else None,
            segments=self._segments,
            keeps_tensors=config.keeps_tensors,
            keeps_blocks=config.keeps_blocks,
            fsync=config.fsync,
        )
        self._ledger = IterationLedger(self._rows.finish, self._commit)
        self._writer = BackgroundWriter(self.fail)
        self._deferred: deque[Row] = deque()
        self._listening: Listening | None = None
        self._shown: set[tuple[object, ...]] = set()  # of the running iteration
        self._entry = threading.Lock()  # between the training thread and whoever closes
        self._failing = threading.Lock()
        self._closed = False  # nothing is taken any more
        self._closing = threading.Lock()
        self._finished = False

    def listen(self, listener: RowListener) -> None:
        """Tell `listener` of every row.

        Where no tensors are kept, those of the CPU are then copied for its sake, and measured by the writers.
        """
        self._listening = self._rows.listening = Listening(listener)
        self._batch = 1  # a copy that waits for others holds memory

    def keep(self, tensor: torch.Tensor, shown: Shown) -> None:
        """Copy or measure `tensor` and hand it over; never raises, since training has to go on."""
        with self._entry:
            if self.failed or self._closed:
                return
            row = None
            try:
                self._refuse_collision(shown)
                row = self._row(tensor, shown)
                self._ledger.handed_over(shown.iteration)
            except Exception as error:
                if row is not None:
                    row.release()
                self.fail(error)
                return
            self._hand_over(row)

    def end_iteration(self, iteration: int, scalars: Mapping[str, float]) -> None:
        """No tensor of `iteration` follows; its commit record is written when its last byte is on disk."""
        with self._entry:
            self._shown.clear()
            if self.failed or self._closed:
                return
            self._send_measured()
            self._ledger.announce_end(iteration)
            self._writer.submit(lambda: self._end(iteration, scalars))

    def fail(self, error: Exception) -> None:
        """End collecting, with one message however often it is called."""
        with self._failing:
            if self.failed:
                return
            self.failed = str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"
        self._ledger.abandon()
        log.error("collecting tensors ended early: %s (%s)", self.failed, self._settings.outcome)
        log.debug("where it went wrong", exc_info=error)
        self._note("stopped", {"reason": self.failed})

    def close(self, reason: str | None = None) -> None:
        """Wait until everything that was handed over is on disk; idempotent, also for two threads at a time.

        Args:
            reason: Why the run ends before its time; None: it does not.
        """
        with self._closing:
            if not self._finished:
                self._close(reason)
                self._finished = True

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
        return self._arena.waited_seconds

    def _close(self, reason: str | None) -> None:
        """May be called again when an interrupt has ended it halfway."""
        with self._entry:
            self._closed = True
            self._send_measured()
        self._writer.close()
        unfinished = self._ledger.unfinished
        self._finish_the_rest()
        if unfinished and reason is None:
            reason = f"the training ended within iteration {unfinished[0]}"
        if self._manifest is not None:
            if reason is not None and not self.failed:
                self._note("stopped", {"reason": reason})
            elif not self.failed:
                self._note("closed", vars(self._ledger.total))
            self._manifest.close()
            if self._ledger.untouched and not self.failed:  # the training never began
                self._manifest.path.unlink()
                remove_run_record(self._manifest.path.parent)
        self._arena.close()

    def _refuse_collision(self, shown: Shown) -> None:
        """Two rows of the same coordinates could not be told apart afterwards."""
        coordinates = shown.coordinates
        if coordinates in self._shown:
            raise CaptureError(
                f"{shown.operation} {shown.tensor_name} of {shown.site.module} was shown twice in micro-batch "
                f"{shown.moment.micro_batch} of iteration {shown.iteration}: a module may run once a micro-batch, and "
                "once more when it is recomputed"
            )
        self._shown.add(coordinates)

    def _row(self, tensor: torch.Tensor, shown: Shown) -> Row:
        start, waited = time.perf_counter(), self._arena.waited_seconds
        taken = self._intake(tensor, shown)
        self.copy_seconds += time.perf_counter() - start - (self._arena.waited_seconds - waited)
        return Row(
            iteration=shown.iteration,
            counter=self._folder.next_counter(),
            describe=partial(shown.metadata, tuple(tensor.shape), tensor.dtype),
            observed=self._listening.observe(tensor, shown) if self._listening and tensor.is_cuda else None,
            **taken,
        )

    def _copied(self, tensor: torch.Tensor, shown: Shown) -> dict[str, Any]:
        copy = self._snapshots.take(tensor)
        link = (
            self._chains.link(shown.site.module, shown.iteration, shown.tensor_name)
            if self._chains is not None
            else None
        )
        return {**vars(copy), "link": link}

    def _measured(self, tensor: torch.Tensor, shown: Shown) -> dict[str, Any]:
        from megatron.quantscope.formats.block_exponents import map_shape

        if self._listening is not None and not tensor.is_cuda:
            return self._copied(tensor, shown)
        measured = self._statistics.measure(tensor)
        size = _MEASURED_BYTES + prod(map_shape(tensor, BLOCK))
        if not self._arena.has_room(size):
            self._statistics.transfer()  # the rows that hold the room may wait for it
            self._hand_over(everything=True)
        return {"measured": measured, "lease": self._arena.take(size)}

    def _send_measured(self) -> None:
        """Hand over every row that was only measured, on a device or here."""
        try:
            self._statistics.transfer()
        except Exception as error:  # a device's, of whatever kind; training has to go on
            self.fail(error)
        self._hand_over(everything=True)

    def _hand_over(self, *rows: Row, everything: bool = False) -> None:
        """Submit rows, and those before them, in batches, or `everything` that can be written.

        What was measured can be when it is on its way to the host.
        """
        self._deferred.extend(rows)
        if len(self._deferred) < self._batch and not everything:
            return
        ready = []
        while self._deferred and (self._deferred[0].measured is None or self._deferred[0].measured.ready):
            ready.append(self._deferred.popleft())
        if ready:
            self._writer.submit(partial(self._write_all, ready))

    def _write_all(self, rows: list[Row]) -> None:
        if self._segments is not None:  # else a content that two iterations share could be written by both at once
            self._ledger.wait_for_those_before(rows[0].iteration)
        for row in rows:
            self._write(row)

    def _write(self, row: Row) -> None:
        try:
            if not self.failed:
                size = self._rows.write(row)
                self._ledger.done(row.iteration, size)
        except Exception as error:
            self.fail(error)  # before a row that waits for this one learns of it
        finally:
            row.release()

    def _end(self, iteration: int, scalars: Mapping[str, float]) -> None:
        if not self.failed:
            self._ledger.ended(iteration, scalars)

    def _commit(self, fields: Mapping[str, Any]) -> None:
        self._append_commit(fields)
        if self._listening is not None:
            self._listening.iteration(fields["iteration"])

    def _append_commit(self, fields: Mapping[str, Any]) -> None:
        if self._manifest is None:
            return
        if self._settings.config.fsync:
            self._manifest.force_to_disk()
        self._manifest.append("commit", fields)
        if self._settings.config.fsync:
            self._manifest.force_to_disk()

    def _finish_the_rest(self) -> None:
        """Make what came of iterations that are not complete readable."""
        try:
            for iteration in self._ledger.unfinished:
                self._ledger.add_files(self._rows.finish(iteration))
        except CaptureError as error:
            self.fail(error)
        if self._segments is not None:
            self._segments.discard()

    def _make_segments(self, budget: Budget) -> Segments:
        settings, config = self._settings, self._settings.config
        kinds = config.keeps_tensors + config.keeps_blocks  # tensors, maps of block exponents
        return Segments(
            settings.folder / RUNS_FOLDER / settings.run_id,
            rank=settings.rank,
            labels={"run_id": settings.run_id, "quant_type": settings.folder.name, "rank": str(settings.rank)},
            budget=budget,
            tensors_expected=lambda: self.sites * _ROWS_A_SITE * config.collect_micro_batches * kinds,
            fsync=config.fsync,
            dry=config.dry_run,
        )

    def _note(self, kind: str, fields: Mapping[str, object]) -> None:
        """Append a line that nothing depends on."""
        if self._manifest is None:
            return
        try:
            self._manifest.append(kind, fields)
        except (CaptureError, ValueError) as error:  # ValueError: the session was closed meanwhile
            log.debug("no %r line in the manifest: %s", kind, error)
