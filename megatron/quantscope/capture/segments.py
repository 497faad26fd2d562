"""The segments of one rank, and where every content in them lies: no byte is written twice.

An output that the next operation takes as its input, the operand of two GEMMs, a weight that no step has changed: each
is recognised by the hash of its content and gets a row that names the bytes which are there already, in whichever
segment they are. The newest contents are remembered, so that memory stays bounded however long a run is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.capture.budget import Budget
from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.files import force_names_to_disk
from megatron.quantscope.capture.hashing import bytes_of
from megatron.quantscope.capture.segment_file import SEGMENT_SUFFIX
from megatron.quantscope.capture.segment_writer import SegmentWriter

if TYPE_CHECKING:
    import torch

_REMEMBERED = 1 << 17  # contents; some 40 MB
_MOST_TENSORS = 1 << 15  # of one file: a header of 10 MB, where readers take 100; more go to a further file
_HEADER_BYTES_A_TENSOR = 320  # a long name, dtype, shape and offsets, and a filler


@dataclass(frozen=True)
class Place:
    """Where the bytes of a tensor are.

    Attributes:
        file: Name of the segment.
        offset: Of the first byte, from the file's begin.
        reference: Whether they were there before.
    """

    file: str
    offset: int
    reference: bool


@dataclass(frozen=True)
class ClosedSegment:
    """A complete segment: its name and its bytes."""

    file: str
    bytes: int


class Segments:
    """Appends tensors to segments, one file an iteration. Safe to use from several threads.

    Args:
        folder: The run's folder.
        rank: Global rank.
        labels: What every header says of the run.
        budget: What the files' bytes are taken from.
        tensors_expected: Asked when a file is made: how many tensors an iteration will have. With more of them the
            iteration gets a further file.
        fsync: Force a file to the disk before it gets its name.
        dry: Count, and touch no disk.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        labels: dict[str, str],
        budget: Budget,
        tensors_expected: Callable[[], int],
        fsync: bool = False,
        dry: bool = False,
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._labels = labels
        self._budget = budget
        self._expected = tensors_expected
        self._fsync = fsync
        self._dry = dry
        self._lock = threading.Lock()
        self._open: dict[int, list[SegmentWriter]] = {}
        self._known: OrderedDict[str, Place] = OrderedDict()
        self._lost: set[tuple[str, int]] = set()  # file and offset of what could not be written
        self._lost_files: set[str] = set()

    def append(self, iteration: int, name: str, tensor: torch.Tensor, fingerprint: str) -> Place:
        """Keep the bytes of a CPU tensor, unless they are there.

        Args:
            iteration: Whose segment it goes to.
            name: Its name there.
            tensor: Contiguous.
            fingerprint: Its checksum.

        Raises:
            CaptureError: when they can not be written, or the budget is spent.
        """
        with self._lock:
            known = self._known.get(fingerprint)
            if known is not None:
                self._known.move_to_end(fingerprint)
                return replace(known, reference=True)
            writer, offset = self._reserve(iteration, name, tensor)
            place = self._known[fingerprint] = Place(writer.path.name, offset, reference=False)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        try:
            writer.write(offset, bytes_of(tensor))
        except OSError as error:
            with self._lock:
                self._lost.add((place.file, offset))
                self._known.pop(fingerprint, None)
                writer.disown(name)
            raise CaptureError(f"can not write {writer.path}: {error.strerror or error}") from error
        return place

    def finish(self, iteration: int) -> list[ClosedSegment]:
        """Complete the iteration's segments; nothing is appended to it any more.

        Raises:
            CaptureError: when one can not be completed; it is gone then, and those after it.
        """
        with self._lock:
            writers = self._open.pop(iteration, [])
        closed: list[ClosedSegment] = []
        for writer in writers:
            try:
                closed.append(ClosedSegment(writer.path.name, writer.finish(fsync=self._fsync)))
            except OSError as error:
                self._lose(writers[len(closed) :])
                raise CaptureError(f"can not write {writer.path}: {error.strerror or error}") from error
        if closed and self._fsync and not self._dry:
            force_names_to_disk(self._folder)
        return closed

    def discard(self) -> None:
        """Remove the segments that are not complete."""
        with self._lock:
            for writers in self._open.values():
                for writer in writers:
                    writer.discard()
            self._open.clear()

    def is_lost(self, place: Place) -> bool:
        """Whether the bytes could not be written, also for a row that refers to them."""
        with self._lock:
            return place.file in self._lost_files or (place.file, place.offset) in self._lost

    def _lose(self, writers: list[SegmentWriter]) -> None:
        with self._lock:
            for writer in writers:
                writer.discard()
                self._lost_files.add(writer.path.name)

    def _reserve(self, iteration: int, name: str, tensor: torch.Tensor) -> tuple[SegmentWriter, int]:
        writers = self._open.setdefault(iteration, [])
        if writers:
            before, offset = writers[-1].size, writers[-1].reserve(name, tensor)
            if offset is not None:
                self._pay(writers[-1].size - before, lambda: writers[-1].take_back(name))
                return writers[-1], offset
        writer = self._make(iteration, len(writers))
        offset = writer.reserve(name, tensor)
        assert offset is not None, "a header with room for one tensor at least"
        self._pay(writer.size, writer.discard)
        writers.append(writer)
        return writer, offset

    def _pay(self, size: int, undo: Callable[[], None]) -> None:
        try:
            self._budget.spend(size)
        except CaptureError:
            undo()
            raise

    def _make(self, iteration: int, part: int) -> SegmentWriter:
        path = self._folder / f"iter{iteration:03d}_rank{self._rank}_{part:03d}{SEGMENT_SUFFIX}"
        labels = self._labels | {"iteration": str(iteration)}
        tensors = min(max(1, self._expected()), _MOST_TENSORS)
        room = _HEADER_BYTES_A_TENSOR * (tensors + 1) + sum(map(len, labels.values()))
        try:
            return SegmentWriter(path, header_room=room, metadata=labels, dry=self._dry)
        except OSError as error:
            raise CaptureError(f"can not write {path}: {error.strerror or error}") from error
