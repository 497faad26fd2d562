"""One row on its way to disk: what the training thread hands over, and what becomes of it on a writer's thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from megatron.quantscope.capture.arena import Lease
from megatron.quantscope.capture.hashing import checksum
from megatron.quantscope.capture.listener import Listening
from megatron.quantscope.capture.manifest import ManifestWriter, line_of
from megatron.quantscope.capture.metadata import TensorMetadata
from megatron.quantscope.capture.names import SUFFIX, CaptureName
from megatron.quantscope.capture.pt_store import Link, PtStore
from megatron.quantscope.capture.record import NO_STORE, PT, SEGMENT
from megatron.quantscope.capture.segments import Place, Segments
from megatron.quantscope.capture.snapshot import size_of

if TYPE_CHECKING:
    import torch

    from megatron.quantscope.capture.statistics_intake import Measurement
    from megatron.quantscope.formats.statistics import TensorStatistics

BLOCK = 32  # elements: the block of every MX format
BLOCKS_SUFFIX = ".block_exponents"  # of the name that a map of block exponents has in a segment
_MEASURED = 4096  # contents whose statistics are remembered for rows that refer to them; some 10 MB

_STAMP_OF_TIME = str.maketrans({" ": "_", "-": None, ":": None})  # SAVE_TIME_FORMAT to STAMP_FORMAT

Measured = tuple["TensorStatistics | None", "torch.Tensor | None"]  # statistics, and the map of block exponents


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kept tensor.

    Attributes:
        iteration: Its iteration.
        counter: Its number among those of the rank.
        describe: Makes its metadata.
        tensor: A copy that nobody else changes; None: only what was measured is kept.
        lease: The memory of the copy.
        wait: Returns when the copy is there; None: it is.
        measured: What was measured when the tensor was shown; None: measure the copy.
        link: Its place in a weight's chain of `pt` files.
        observed: What a listener found out on the tensor's device.
    """

    iteration: int
    counter: int
    describe: Callable[[], TensorMetadata]
    tensor: torch.Tensor | None = None
    lease: Lease | None = None
    wait: Callable[[], None] | None = None
    measured: Measurement | None = None
    link: Link | None = None
    observed: object = None

    def release(self) -> None:
        """Give back the memory, and let no later row of the chain wait."""
        if self.lease is not None:
            if self.wait is not None:
                self.wait()  # a device may still be writing to it, also for a row that is not written any more
            self.lease.give_back()
        if self.link is not None:
            self.link.stored.cancel()


class RowWriter:
    """Writes rows: hash, bytes, statistics, manifest line. Safe to use from several threads.

    A line names bytes that are on disk. Those of a `pt` file are when it is written, those of a segment when the
    iteration ends; where any segment is written, lines wait for that.

    Args:
        manifest: Where lines go; None: nowhere, in a dry run.
        files: Writes `pt` files; None: another store does.
        segments: Holds tensors where `files` is None, and the maps of block exponents; None: not needed.
        keeps_tensors: Whether tensors are stored; if not, a row's copy is only measured.
        keeps_blocks: Whether maps of block exponents are made.
    """

    def __init__(
        self,
        *,
        manifest: ManifestWriter | None,
        files: PtStore | None,
        segments: Segments | None,
        keeps_tensors: bool = True,
        keeps_blocks: bool,
        fsync: bool = False,
    ) -> None:
        self.listening: Listening | None = None  # told of every row
        self._manifest = manifest
        self._files = files
        self._segments = segments
        self._keeps_tensors = keeps_tensors
        self._keeps_blocks = keeps_blocks
        self._fsync = fsync
        self._lock = threading.Lock()
        self._waiting: dict[int | None, list[tuple[int, list[Place], str]]] = {}
        self._measured: OrderedDict[tuple[Any, ...], tuple[dict[str, Any], list[Place]]] = OrderedDict()

    def write(self, row: Row) -> int | None:
        """Write one row.

        Returns:
            The size of its file; None where it has none of its own.

        Raises:
            CaptureError: when it can not be written, or the budget is spent.
        """
        known = row.describe()
        metadata, name = known.to_dict(), name_of(known, row.counter)
        places: list[Place] = []  # in segments, that the line names
        place: dict[str, Any] = {"store": NO_STORE, "file": None, "offset": None, "bytes": 0}
        place |= {"checksum": None, "reference": False}
        size = None
        if row.tensor is not None:
            if row.wait is not None:
                row.wait()
            if self._keeps_tensors:
                place, size = self._put(row, row.tensor, metadata, name, places)
        figures = self._figures(row, name, (place["checksum"], known.dtype, known.shape), places)
        line = line_of("tensor", place | {"counter": row.counter} | metadata | figures)
        self._hand_in(row, places, line)
        if self.listening is not None:
            self.listening.row(known, figures["statistics"], row.tensor, row.observed)
        return size

    def finish(self, iteration: int) -> list[int]:
        """Complete the iteration's segments and append the lines that waited for them.

        Returns:
            The sizes of the segments.

        Raises:
            CaptureError: when one can not be completed, or the manifest not be written.
        """
        closed = self._segments.finish(iteration) if self._segments is not None else []
        with self._lock:
            waiting = sorted(self._waiting.pop(iteration, []), key=itemgetter(0))
        lines = [line_of("segment", {"iteration": iteration, **vars(segment)}) for segment in closed]
        lines += [line for _, places, line in waiting if not any(map(self._lost, places))]
        if self._manifest is not None and lines:
            self._manifest.append_lines(lines)
        if self._fsync and self._files is not None:
            self._files.force_to_disk()
        return [segment.bytes for segment in closed]

    def _put(
        self, row: Row, tensor: torch.Tensor, metadata: dict[str, Any], name: CaptureName, places: list[Place]
    ) -> tuple[dict[str, Any], int | None]:
        """Where the row's tensor is now, and the size of a file of its own."""
        fingerprint = checksum(tensor)
        if self._files is not None:
            stored, reference = self._files.put(tensor, metadata, name, fingerprint, row.link)
            place = {"store": PT, "file": stored.file, "offset": None, "bytes": stored.bytes}
            size = None if reference else stored.bytes
        else:
            kept = self._append(name, tensor, fingerprint, "")
            place = {"store": SEGMENT, "file": kept.file, "offset": kept.offset, "bytes": size_of(tensor)}
            reference, size = kept.reference, None
            places.append(kept)
        return place | {"checksum": fingerprint, "reference": reference}, size

    def _figures(self, row: Row, name: CaptureName, content: tuple[Any, ...], places: list[Place]) -> dict[str, Any]:
        """Statistics and block exponents, as a line holds them."""
        known = self._known(content)
        if known is None:
            own: list[Place] = []
            statistics, blocks = row.measured() if row.measured is not None else self._measure(row.tensor)
            figures = {
                "statistics": None if statistics is None else statistics.to_json(),
                "blocks": None if blocks is None else self._put_blocks(name, blocks, own),
            }
            known = figures, own
            self._remember(content, known)
        places.extend(known[1])
        return known[0]

    def _known(self, content: tuple[Any, ...]) -> tuple[dict[str, Any], list[Place]] | None:
        with self._lock:
            return self._measured.get(content)

    def _remember(self, content: tuple[Any, ...], known: tuple[dict[str, Any], list[Place]]) -> None:
        fingerprint, *_ = content
        if fingerprint is None:  # of what was measured and not kept
            return
        with self._lock:
            self._measured[content] = known
            if len(self._measured) > _MEASURED:
                self._measured.popitem(last=False)

    def _measure(self, tensor: torch.Tensor | None) -> Measured:
        assert tensor is not None
        return measured(tensor, blocks=self._keeps_blocks)

    def _put_blocks(self, name: CaptureName, blocks: torch.Tensor, places: list[Place]) -> dict[str, Any]:
        from megatron.quantscope.formats import block_counts

        fingerprint = checksum(blocks)
        kept = self._append(name, blocks, fingerprint, BLOCKS_SUFFIX)
        places.append(kept)
        counts = {str(exponent): count for exponent, count in block_counts(blocks).items()}
        place = {"file": kept.file, "offset": kept.offset, "shape": list(blocks.shape), "size": BLOCK}
        return place | {"counts": counts}

    def _append(self, name: CaptureName, content: torch.Tensor, fingerprint: str, suffix: str) -> Place:
        assert self._segments is not None
        stem = name.filename().removesuffix(SUFFIX)
        return self._segments.append(name.iteration or 0, stem + suffix, content, fingerprint)

    def _hand_in(self, row: Row, places: list[Place], line: str) -> None:
        """Append the line, now or at the iteration's end."""
        if self._segments is not None:
            with self._lock:
                self._waiting.setdefault(row.iteration, []).append((row.counter, places, line))
        elif self._manifest is not None:
            self._manifest.append_lines([line])

    def _lost(self, place: Place) -> bool:
        return self._segments is not None and self._segments.is_lost(place)


def measured(tensor: torch.Tensor, *, blocks: bool) -> Measured:
    """The statistics of a tensor and, with `blocks`, its block exponents; None for a dtype without real values."""
    from megatron.quantscope import formats

    try:
        if not blocks:
            return formats.measure(tensor), None
        statistics, exponents = formats.measure_blocks(tensor, block=BLOCK)
    except TypeError:
        return None, None
    return statistics, exponents.cpu()


def name_of(metadata: TensorMetadata, counter: int) -> CaptureName:
    """The file name that belongs to `metadata`."""
    return CaptureName(
        stamp=(metadata.save_time or "").translate(_STAMP_OF_TIME),
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
