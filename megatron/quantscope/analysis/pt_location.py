"""Where the elements of a `pt` file begin, without unpickling what is said of them.

torch takes a millisecond to unpickle the metadata of a captured file safely, which is longer than it takes to measure
half a megabyte; of a file that a manifest lists, shape and dtype are known. torch writes a tensor as a stored, not
compressed, entry `.../data/0` of a zip archive, so its place follows from the archive's directory, and it is mapped
there like a tensor in a segment. A file that is not as this program writes it is opened by torch.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from megatron.quantscope.capture.location import Location

if TYPE_CHECKING:
    from megatron.quantscope.capture.record import TensorRecord

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of name and extra field, which follow it
_SIGNATURE = b"PK\x03\x04"
_PICKLE, _TENSOR, _BYTEORDER = "data.pkl", "data/0", "byteorder"
_PICKLE_START, _PICKLE_END = b"\x80\x02", b"."


def pt_location(record: TensorRecord) -> Location | None:
    """The tensor's place inside its `pt` file; None where only torch can tell.

    Args:
        record: One that a manifest lists, so it was written dense and row by row.
    """
    if record.bare or record.path is None or record.offset is not None or record.shape is None or record.dtype is None:
        return None
    try:
        with open(record.path, "rb") as file, ZipFile(file) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            known = _is_known(file, entries)
            offset = _start(file, entries[_TENSOR])
    except (OSError, BadZipFile, KeyError, ValueError, struct.error):
        return None
    location = Location(record.path, offset, tuple(record.shape), record.dtype)
    return location if known and entries[_TENSOR].file_size == _bytes_of(location) else None


def _is_known(file: IO[bytes], entries: Mapping[str, ZipInfo]) -> bool:
    """Whether the archive looks as torch writes one tensor, and its parts are where its directory says."""
    pickle = _content(file, entries[_PICKLE])
    return (
        all(entry.compress_type == ZIP_STORED for entry in entries.values())
        and [name for name in entries if name.startswith("data/")] == [_TENSOR]
        and _content(file, entries[_BYTEORDER]) == sys.byteorder.encode()
        and pickle.startswith(_PICKLE_START)
        and pickle.endswith(_PICKLE_END)
    )


def _content(file: IO[bytes], entry: ZipInfo) -> bytes:
    file.seek(_start(file, entry))
    return file.read(entry.file_size)


def _start(file: IO[bytes], entry: ZipInfo) -> int:
    """Where the bytes of an entry begin.

    Raises:
        ValueError: The entry does not begin with its name.
    """
    file.seek(entry.header_offset)
    signature, name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if signature != _SIGNATURE or file.read(name) != entry.filename.encode():
        raise ValueError(f"no entry {entry.filename} at {entry.header_offset}")
    return entry.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)


def _bytes_of(location: Location) -> int | None:
    import torch

    dtype = getattr(torch, location.dtype, None)
    return math.prod(location.shape) * dtype.itemsize if isinstance(dtype, torch.dtype) else None
