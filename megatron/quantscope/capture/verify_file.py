"""Checking one `pt` file against the rows that name it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.hashing import bytes_of, digest_of
from megatron.quantscope.capture.metadata import TensorMetadata, metadata_values
from megatron.quantscope.capture.plain import to_json
from megatron.quantscope.capture.record import TensorRecord
from megatron.quantscope.capture.report import DAMAGED, MISSING, Report
from megatron.quantscope.capture.tensor_file import load_file

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def check_file(path: Path, size: int | None, records: Sequence[TensorRecord], report: Report) -> None:
    """Check a file.

    Args:
        path: The file.
        size: Its bytes; None: it is not there.
        records: The rows that name it: of the tensor it was written for, and those that refer to it.
        report: Where findings go.
    """
    if size is None:
        report.find(MISSING, path, f"missing, and with it the tensor of {len(records)} rows")
        return
    wrong = _wrong_size(size, records)
    if wrong is None:
        try:
            wrong = _wrong_content(path, records)
        except CaptureError as error:
            wrong = str(error)
    if wrong is not None:
        report.find(DAMAGED, path, wrong)
        return
    report.ok += len(records)
    report.bytes += size


def wrong_digest(record: TensorRecord, content: Callable[[], ReadableBuffer], digests: dict[str, str]) -> str | None:
    """What is wrong with the bytes of a record's tensor.

    Args:
        record: The record.
        content: Gives the bytes.
        digests: Algorithm -> digest of these bytes, as far as they have been hashed.

    Raises:
        CaptureError: for an algorithm that is not known.
    """
    algorithm, _, expected = (record.checksum or "").partition(":")
    if algorithm not in digests:
        digests[algorithm] = digest_of(content(), algorithm)
    if digests[algorithm] == expected:
        return None
    return f"the tensor of counter {record.counter} is another than was written: its {algorithm} differs"


def _wrong_size(size: int, records: Sequence[TensorRecord]) -> str | None:
    said = next((record.bytes for record in records if record.bytes != size), None)
    return None if said is None else f"{size} bytes instead of {said}"


def _wrong_content(path: Path, records: Sequence[TensorRecord]) -> str | None:
    tensor, metadata = load_file(path)
    there = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    digests: dict[str, str] = {}
    for record in records:
        if (record.dtype, record.shape) != there:
            return f"the tensor of counter {record.counter} is {there}, its row says {(record.dtype, record.shape)}"
        wrong = wrong_digest(record, lambda: bytes_of(tensor), digests)
        if wrong is None and not record.reference:
            wrong = _wrong_metadata(record, metadata)
        if wrong is not None:
            return wrong
    return None


def _wrong_metadata(record: TensorRecord, metadata: Mapping[str, Any]) -> str | None:
    try:
        there = _plain(TensorMetadata(**metadata_values(metadata)))
    except (TypeError, ValueError, AttributeError) as error:
        return f"its metadata can not be read: {error}"
    said = _plain(TensorMetadata(**{field.name: getattr(record, field.name) for field in fields(TensorMetadata)}))
    different = [name for name, value in said.items() if there.get(name) != value]
    return f"its metadata differs from its row in {', '.join(different)}" if different else None


def _plain(metadata: TensorMetadata) -> dict[str, Any]:
    """As JSON has it, where a NaN equals itself."""
    plain: dict[str, Any] = json.loads(to_json(metadata.to_dict()))
    return plain
