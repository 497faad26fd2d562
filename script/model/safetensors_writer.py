"""Writes safetensors files one tensor at a time; the library's own writer wants all of a file's tensors in memory.

A file is 8 bytes (little endian) that say how long the header is, the header, and the tensors' bytes end to end:

    {"__metadata__": {"format": "pt"}, NAME: {"dtype": "BF16", "shape": [N, K], "data_offsets": [FIRST, END]}, ...}

Sizes are known before values are, so the header can come first. It is padded with spaces to a multiple of 8 bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

DTYPE_NAMES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
HEADER_ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """A tensor that will be written: its name and its shape."""

    name: str
    shape: tuple[int, ...]

    def size(self, dtype: str) -> int:
        """Bytes it takes in `dtype`, a key of DTYPE_BYTES."""
        return math.prod(self.shape) * DTYPE_BYTES[dtype]


def write_safetensors(path: Path, entries: Sequence[Entry], tensors: Iterable[Tensor], dtype: str) -> None:
    """Write a file.

    Args:
        path: the file; replaced if it is there.
        entries: what comes, in order.
        tensors: the values, as they come; rounded to `dtype`.
        dtype: a key of DTYPE_NAMES.

    Raises:
        ValueError: a tensor has not the shape of its entry.
        OSError: the file can not be written.
    """
    import torch

    target = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    with path.open("wb") as file:
        file.write(_header(entries, dtype))
        for entry, tensor in zip(entries, tensors, strict=True):
            if tuple(tensor.shape) != entry.shape:
                raise ValueError(f"{entry.name} is {list(tensor.shape)}, {list(entry.shape)} was announced")
            file.write(tensor.to(target).contiguous().view(torch.uint8).numpy().data)


def shards(entries: Iterable[Entry], dtype: str, max_bytes: int) -> list[list[Entry]]:
    """Deal entries out, in order, to files of at most `max_bytes` of tensors; a larger tensor has a file of its own."""
    dealt: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not dealt or entry.size(dtype) > room:
            dealt.append([])
            room = max_bytes
        dealt[-1].append(entry)
        room -= entry.size(dtype)
    return dealt


def _header(entries: Sequence[Entry], dtype: str) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.size(dtype)
        header[entry.name] = {"dtype": DTYPE_NAMES[dtype], "shape": entry.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
