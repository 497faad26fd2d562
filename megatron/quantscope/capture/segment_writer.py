"""One segment: the tensors of a rank and iteration in one file, which any reader of safetensors opens.

    8 bytes   length of the header, little-endian
    header    {"__metadata__": {...}, NAME: {"dtype": "BF16", "shape": [...], "data_offsets": [begin, end]}, ...}
    data      the tensors, row-major, little-endian

The format puts the header first and knows no gaps, while a capture learns its tensors one by one and wants each at an
aligned address. So room for the header is set aside and filled with spaces when the file is made, the tensors follow
as they come, the gaps between them and after the last are fillers with names of their own, and the header is written
last. Until then the file has a temporary name: a segment is complete or absent. Its size does not depend on the order
of its tensors, which two threads decide.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.quantscope.capture.arena import ALIGNMENT
from megatron.quantscope.capture.files import force_to_disk, give_name, temporary_for
from megatron.quantscope.capture.segment_file import LENGTH_BYTES, METADATA, PADDING, WORDS

if TYPE_CHECKING:
    import torch

_PAGE = 4096
_LAST_FILLER = 128  # bytes of header
_LONGEST_WRITE = 1 << 30  # bytes of one system call; Linux takes 2 GB less a page
_RAW = "U8"  # bytes: what a dtype that the format has no word for is kept as


class SegmentWriter:
    """Writes one segment. `reserve`, `take_back` and `disown` belong to whoever holds the lock; `write` to any thread.

    Args:
        path: The file's name when it is complete.
        header_room: Bytes set aside for the header.
        metadata: Strings for the header's own metadata.
        dry: Count, and touch no disk.

    Raises:
        OSError: when the file can not be made.
    """

    def __init__(self, path: Path, *, header_room: int, metadata: Mapping[str, str], dry: bool = False) -> None:
        self.path = path
        self._entries: dict[str, dict[str, Any]] = {}
        self._data = -(-(header_room + LENGTH_BYTES) // _PAGE) * _PAGE
        self._end = self._data
        self._header_size = len(_header_text({METADATA: dict(metadata)})) + _LAST_FILLER
        self._metadata = dict(metadata)
        self._fillers = 0
        self._temporary = temporary_for(path)
        self._file: int | None = None
        if not dry:
            self._file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                self._write_all(0, memoryview(b" " * self._data))  # a full disk says so now, not at the end
            except OSError:
                self.discard()
                raise

    @property
    def size(self) -> int:
        """Bytes that the file would have if it were finished now."""
        return _aligned(self._end)

    def reserve(self, name: str, tensor: torch.Tensor) -> int | None:
        """A place for `tensor` under `name`; its offset in the file, or None when the header has no room for it."""
        size = tensor.numel() * tensor.element_size()
        begin = _aligned(self._end)
        new = self._filler(begin)
        new[name] = self._entry(*_word(tensor), begin, begin + size)
        added = len(_header_text(new)) + 1  # and a comma
        if self._header_size + added > self._data - LENGTH_BYTES:
            return None
        self._fillers += len(new) - 1
        self._header_size += added
        self._entries.update(new)
        self._end = begin + size
        return begin

    def write(self, offset: int, content: memoryview) -> None:
        """Fill a reserved place.

        Raises:
            OSError: when the disk does not take it.
        """
        if self._file is not None:
            self._write_all(offset, content)

    def take_back(self, name: str) -> None:
        """Give up the place that was reserved last, before it is written."""
        begin, _ = self._entries.pop(name)["data_offsets"]
        self._end = self._data + begin

    def disown(self, name: str) -> None:
        """Make a filler of a place that could not be written."""
        entry = self._entries.pop(name)
        begin, end = entry["data_offsets"]
        self._entries[f"{PADDING}{self._fillers}"] = entry | {"dtype": _RAW, "shape": [end - begin]}
        self._fillers += 1

    def finish(self, *, fsync: bool = False) -> int:
        """Fill up to a whole number of alignments, write the header and give the file its name.

        Returns:
            Its size in bytes.

        Raises:
            OSError: when that fails; then there is no file.
        """
        begin = _aligned(self._end)
        self._entries |= self._filler(begin)
        self._end = begin
        if self._file is None:
            return self._end
        try:
            room = self._data - LENGTH_BYTES
            header = _header_text({METADATA: self._metadata, **self._entries}).encode().ljust(room)
            self._write_all(0, memoryview(room.to_bytes(LENGTH_BYTES, "little") + header))
            os.ftruncate(self._file, self._end)  # nothing writes fillers
            os.close(self._file)
            self._file = None
            if fsync:
                force_to_disk(self._temporary)
            give_name(self._temporary, self.path)
        finally:
            self.discard()
        return self._end

    def discard(self) -> None:
        """Remove what has no name yet; idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._temporary.unlink(missing_ok=True)

    def _filler(self, begin: int) -> dict[str, dict[str, Any]]:
        """The entry of what lies between the last tensor and `begin`; empty when nothing does."""
        if begin == self._end:
            return {}
        return {f"{PADDING}{self._fillers}": self._entry(_RAW, [begin - self._end], self._end, begin)}

    def _entry(self, dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin - self._data, end - self._data]}

    def _write_all(self, offset: int, content: memoryview) -> None:
        assert self._file is not None
        while len(content):
            written = os.pwrite(self._file, content[:_LONGEST_WRITE], offset)
            content, offset = content[written:], offset + written


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _word(tensor: torch.Tensor) -> tuple[str, list[int]]:
    """The format's dtype and shape of a tensor."""
    word = WORDS.get(str(tensor.dtype).removeprefix("torch."))
    if word is None:
        return _RAW, [tensor.numel() * tensor.element_size()]
    return word, list(tensor.shape)


def _header_text(entries: Mapping[str, Any]) -> str:
    return json.dumps(entries, separators=(",", ":"))
