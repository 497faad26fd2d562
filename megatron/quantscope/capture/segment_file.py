"""Opening a segment: a safetensors file that holds the tensors of a rank and iteration.

A manifest row says where its tensor lies, so reading one needs no header: the pages that hold it are mapped, privately
and copy-on-write, and nothing is read before it is looked at.

The mapping is made through the C library. Python's `mmap` keeps a file open for every mapping, and a thousand tensors
would use up what a process may open; torch's own mapping begins at the start of the file, and Linux refuses one that is
larger than the memory, as a segment may well be.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.quantscope.capture.errors import CaptureError

if TYPE_CHECKING:
    import torch

SEGMENT_SUFFIX = ".safetensors"
PADDING = "padding_"  # what the fillers between tensors are called
LENGTH_BYTES = 8
METADATA = "__metadata__"

# torch's name of a dtype -> the format's word. Others are kept as bytes.
WORDS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
_LONGEST_HEADER = 1 << 30
_FAILED = ctypes.c_void_p(-1).value  # MAP_FAILED
# Linux reserves memory for every page that might be written to; these pages rarely are.
_FLAGS = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)


@dataclass(frozen=True)
class Entry:
    """One tensor of a header: `offset` from the begin of the file; `bytes` of its elements."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class SegmentHeader:
    """What a segment says of itself.

    Attributes:
        labels: The strings of its `__metadata__`.
        entries: Tensor name -> entry, fillers among them.
        end: Size that the file must have.
    """

    labels: Mapping[str, str]
    entries: Mapping[str, Entry] = field(default_factory=dict)
    end: int


def map_tensor(path: Path, offset: int, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """The tensor at `offset`, memory-mapped; what is written to it stays in memory.

    Args:
        path: The segment.
        offset: Of the first element, in bytes from the file's begin.
        shape: Elements along each dimension; they lie row by row.
        dtype: torch's name of it.

    Raises:
        CaptureError: when the file is missing or too short, or there is no such dtype.
    """
    import torch

    kind = _dtype(path, dtype)
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=kind)
    content = map_bytes(path, offset, count * kind.itemsize)
    return torch.frombuffer(content, dtype=torch.uint8).view(kind).reshape(tuple(shape))


def map_bytes(path: Path, offset: int, size: int) -> ctypes.Array[ctypes.c_ubyte]:
    """`size` > 0 bytes of a file as a buffer that is private to the caller.

    Raises:
        CaptureError: when the file is missing or ends before them.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            there = os.fstat(file).st_size
            if offset + size > there:
                raise CaptureError(f"{path} is damaged: {there} bytes, and a tensor ends at {offset + size}")
            return _map(file, offset, size)
        finally:
            os.close(file)
    except OSError as error:
        raise CaptureError(f"{path} can not be read: {error.strerror or error}") from error


def read_header(path: Path) -> SegmentHeader:
    """The header of a segment.

    Raises:
        CaptureError: when the file can not be read, or its header is not one.
    """
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(LENGTH_BYTES), "little")
            text = file.read(size) if size <= _LONGEST_HEADER else b""
        if len(text) != size:
            raise ValueError("it ends too early")
        return _header(json.loads(text), LENGTH_BYTES + size)
    except OSError as error:
        raise CaptureError(f"{path} can not be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CaptureError(f"{path} has a broken header: {str(error) or type(error).__name__}") from error


def _header(content: Mapping[str, Any], begin: int) -> SegmentHeader:
    """The header, when its tensors follow each other without a gap, as the format demands."""
    entries = {}
    for name, fields in content.items():
        if name != METADATA:
            first, last = fields["data_offsets"]
            entries[name] = Entry(fields["dtype"], tuple(fields["shape"]), begin + first, last - first)
    end = begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if entry.offset != end or entry.bytes < 0:
            raise ValueError(f"{name} does not begin where the tensor before it ends")
        end += entry.bytes
    return SegmentHeader(labels=content.get(METADATA, {}), entries=entries, end=end)


def _dtype(path: Path, name: str) -> torch.dtype:
    import torch

    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        raise CaptureError(f"{path} holds a tensor of a dtype that torch does not know: {name!r}")
    return kind


def _map(file: int, offset: int, size: int) -> ctypes.Array[ctypes.c_ubyte]:
    begin = offset - offset % mmap.ALLOCATIONGRANULARITY
    length = offset + size - begin
    library = _library()
    address = library.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, _FLAGS, file, begin)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    content = (ctypes.c_ubyte * size).from_address(address + offset - begin)
    # Whoever looks at the bytes keeps `content`. At exit the system unmaps, when nobody can look any more.
    weakref.finalize(content, library.munmap, address, length).atexit = False
    return content


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    size, number = ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes = (ctypes.c_void_p, size, number, number, number, ctypes.c_int64)
    library.mmap.restype = ctypes.c_void_p
    library.munmap.argtypes = (ctypes.c_void_p, size)
    return library
