"""Checking one segment: its header, the tensors and the block maps that rows have in it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.names import SUFFIX
from megatron.quantscope.capture.record import TensorRecord
from megatron.quantscope.capture.report import DAMAGED, MISSING, UNCOMMITTED, Report
from megatron.quantscope.capture.rows import BLOCKS_SUFFIX
from megatron.quantscope.capture.segment_file import (
    PADDING,
    WORDS,
    SegmentHeader,
    map_bytes,
    map_tensor,
    read_header,
)
from megatron.quantscope.capture.verify_file import wrong_digest

_RAW = "U8"  # what holds a dtype that safetensors has no word for
_Place = tuple[int, int]  # offset and bytes


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A segment and everything that speaks of it.

    Attributes:
        path: The file.
        size: Its bytes; None: it is not there.
        line: Its line in a manifest; None: it has none.
        committed: Whether its iteration is.
        labels: What its header has to say of itself.
        tensors: The records whose tensors are in it.
        maps: The records whose block maps are in it.
    """

    path: Path
    size: int | None
    line: Mapping[str, Any] | None
    committed: bool
    labels: Mapping[str, str]
    tensors: Sequence[TensorRecord]
    maps: Sequence[TensorRecord]


def check_segment(segment: Segment, report: Report) -> None:
    """Check a segment."""
    path = segment.path
    if segment.size is None:
        lost = f", and with it the tensors of {len(segment.tensors)} rows and the block maps of {len(segment.maps)}"
        report.find(MISSING, path, "missing" + lost)
        return
    if segment.line is None:
        report.find(UNCOMMITTED, path, "no line of a manifest says that it is complete")
    elif segment.size != segment.line["bytes"]:
        report.find(DAMAGED, path, f"{segment.size} bytes instead of {segment.line['bytes']}")
    try:
        header = read_header(path)
    except CaptureError as error:
        report.find(DAMAGED, path, str(error))
    else:
        for message in _wrong_header(segment, header):
            report.find(DAMAGED, path, message)
        without = _without_row(segment, header)
        if without:
            kind = MISSING if segment.committed else UNCOMMITTED
            report.find(kind, path, f"no row names {len(without)} of its tensors, such as {without[0]}")
    _check_tensors(segment, report)
    _check_maps(segment, report)


def _wrong_header(segment: Segment, header: SegmentHeader) -> Iterator[str]:
    if header.end != segment.size:
        yield f"{segment.size} bytes, its header speaks of {header.end}"
    for name, value in segment.labels.items():
        if header.labels.get(name) != value:
            yield f"its header says {name} {header.labels.get(name)}, its run {value}"
    places = {(entry.offset, entry.bytes) for entry in header.entries.values()}
    for record in segment.tensors:
        yield from _wrong_entry(header, places, record, _place(record), _word_and_shape(record))
    for record in segment.maps:
        yield from _wrong_entry(header, places, record, _map_place(record), (_RAW, _map_shape(record)), BLOCKS_SUFFIX)


def _wrong_entry(
    header: SegmentHeader,
    places: Collection[_Place],
    record: TensorRecord,
    place: _Place,
    expected: tuple[str, tuple[int, ...]],
    suffix: str = "",
) -> Iterator[str]:
    """The header has a tensor where a row says; the one that was written for this row has its name, dtype and shape."""
    entry = header.entries.get(_stem(record) + suffix)
    if entry is None or (entry.offset, entry.bytes) != place:
        written_for_another = record.reference or suffix
        if not written_for_another or (place[1] and place not in places):
            yield f"its header has no tensor where the row with counter {record.counter} says"
    elif (entry.dtype, entry.shape) != expected:
        yield f"its header calls {_stem(record)}{suffix} {entry.dtype} {list(entry.shape)}, its row says otherwise"


def _without_row(segment: Segment, header: SegmentHeader) -> list[str]:
    """The tensors of the header that no row has."""
    named = {_stem(record) for record in segment.tensors} | {_stem(record) + BLOCKS_SUFFIX for record in segment.maps}
    return [name for name in header.entries if name not in named and not name.startswith(PADDING)]


def _stem(record: TensorRecord) -> str:
    return record.name.filename().removesuffix(SUFFIX)


def _place(record: TensorRecord) -> _Place:
    return record.offset or 0, record.bytes


def _map_place(record: TensorRecord) -> _Place:
    return _blocks(record)["offset"], math.prod(_blocks(record)["shape"])


def _map_shape(record: TensorRecord) -> tuple[int, ...]:
    return tuple(_blocks(record)["shape"])


def _word_and_shape(record: TensorRecord) -> tuple[str, tuple[int, ...]]:
    """How the header describes a tensor of the record's dtype."""
    word = WORDS.get(record.dtype or "")
    return (_RAW, (record.bytes,)) if word is None else (word, record.shape or ())


def _check_tensors(segment: Segment, report: Report) -> None:
    place, digests = None, {}
    for record in sorted(segment.tensors, key=lambda record: (_place(record), record.counter)):
        if place != _place(record):  # rows that share bytes come one after the other, and these are hashed once
            place, digests = _place(record), dict[str, str]()
        hashed = len(digests)
        try:
            wrong = _wrong_length(record) or wrong_digest(record, partial(_content, record), digests)
        except CaptureError as error:
            wrong = str(error)
        if wrong is not None:
            report.find(DAMAGED, segment.path, wrong)
        else:
            report.ok += 1
            report.bytes += record.bytes if not hashed else 0


def _wrong_length(record: TensorRecord) -> str | None:
    import torch

    kind = getattr(torch, record.dtype or "", None)
    size = math.prod(record.shape or ()) * kind.itemsize if isinstance(kind, torch.dtype) else None
    if size == record.bytes:
        return None
    return f"the row with counter {record.counter} says {record.bytes} bytes of {record.dtype} {record.shape}"


def _content(record: TensorRecord) -> Any:
    assert record.path is not None
    assert record.offset is not None
    return map_bytes(record.path, record.offset, record.bytes) if record.bytes else b""


def _check_maps(segment: Segment, report: Report) -> None:
    """The maps against their counts, which is all that was kept of them elsewhere."""
    for record in segment.maps:
        blocks = _blocks(record)
        try:
            found = map_tensor(segment.path, blocks["offset"], blocks["shape"], "uint8").reshape(-1).bincount()
            counts = {str(value): count for value, count in enumerate(found.tolist()) if count}
            wrong = None if counts == blocks["counts"] else "is another than was written: its counts differ"
        except CaptureError as error:
            wrong = f"can not be read: {error}"
        if wrong is None and not _covers(blocks, record.shape or ()):
            wrong = f"has the shape {blocks['shape']}, for a tensor of {record.shape}"
        if wrong is not None:
            report.find(DAMAGED, segment.path, f"the block map of counter {record.counter} {wrong}")
        else:
            report.bytes += math.prod(blocks["shape"])


def _covers(blocks: Mapping[str, Any], shape: Sequence[int]) -> bool:
    """Whether a map has the shape that belongs to a tensor's."""
    *leading, last = shape or (1,)
    return list(blocks["shape"]) == [*leading, -(-last // blocks["size"])]


def _blocks(record: TensorRecord) -> dict[str, Any]:
    assert record.blocks is not None, "a record with a map"
    return record.blocks
