"""An input file cut into pieces that hold whole documents, without looking into these.

What takes time is done to a piece by a worker: decoding JSON or XML, reducing wikitext to text, tokenising. What is
left to the one process that reads is to unpack the file and to find the ends:

    Wikipedia dump (.xml)   a piece ends with "</page>", which MediaWiki escapes inside texts
    JSON lines              a piece ends with a line
    any other file          is one document and one piece

and each of the three may be packed with bzip2 or gzip. Dumps that Wikipedia calls "multistream" are many small bzip2
files one behind the other, each of whole pages: their pieces are these, still packed, so that workers unpack too.

A piece says where the next one begins, and reading can begin there again. In a packed file that is not multistream
everything before that place has to be unpacked once more.
"""

from __future__ import annotations

import bz2
import gzip
import mmap
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

PIECE_BYTES = 1 << 20

PAGE_BEGIN, PAGE_END, DUMP_END = b"<page>", b"</page>", b"</mediawiki>"
STREAM_BEGIN, BLOCK_BEGIN = re.compile(rb"BZh[1-9]"), b"1AY&SY"  # the first bytes of a bzip2 file with content
STREAM_HEAD_BYTES = 4

XML, LINES, TEXT = ".xml", ".jsonl", "text"
_KINDS = {".xml": XML, ".jsonl": LINES, ".json": LINES}
_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {".bz2": bz2.open, ".gz": gzip.open}


@dataclass(frozen=True)
class Cursor:
    """A place between two pieces of a file.

    Attributes:
        offset: in bytes, of the unpacked content; in multistream dumps of the file.
        line: lines before it, in JSON lines.
    """

    offset: int = 0
    line: int = 0


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some whole documents of a file.

    Attributes:
        path: the file.
        kind: XML, LINES or TEXT.
        content: their bytes.
        packed: the content is packed with bzip2.
        line: lines of the file before it.
        end: where the next piece begins.
        consumed: bytes of the file, as it lies on disk, that have been read.
        number: of the file among several, for who reads them.
    """

    path: Path
    kind: str
    content: bytes
    packed: bool = False
    line: int = 0
    end: Cursor
    consumed: int
    number: int = 0


def kind_of(path: Path) -> str:
    """What a file holds, by its name: XML, LINES or TEXT."""
    return _KINDS.get(Path(path.stem).suffix if path.suffix in _OPENERS else path.suffix, TEXT)


def read_pieces(path: Path, start: Cursor | None = None) -> Iterator[Piece]:
    """Yield the pieces of a file, from a place on.

    Raises:
        OSError, EOFError, ValueError: it can not be read or unpacked, or ends in the middle.
    """
    start, kind = start or Cursor(), kind_of(path)
    if kind == XML and path.suffix == ".bz2" and _is_multistream(path):
        yield from _streams(path, start)
        return
    with path.open("rb") as raw, _OPENERS.get(path.suffix, lambda file: file)(raw) as file:
        for piece_start, content in _CUTS[kind](file, start):
            end = Cursor(piece_start.offset + len(content), piece_start.line + content.count(b"\n"))
            yield Piece(path=path, kind=kind, content=content, line=piece_start.line, end=end, consumed=raw.tell())


def _cut_pages(file: IO[bytes], start: Cursor) -> Iterator[tuple[Cursor, bytes]]:
    file.seek(start.offset)
    offset, buffer = start.offset, b""
    while block := file.read(PIECE_BYTES):
        buffer += block
        end = buffer.rfind(PAGE_END)
        if end >= 0:
            content = buffer[: end + len(PAGE_END)]
            yield Cursor(offset), content
            offset, buffer = offset + len(content), buffer[len(content) :]
    if DUMP_END not in buffer:
        raise ValueError("it ends in the middle of a dump, or is none: there is no </mediawiki>")


def _cut_lines(file: IO[bytes], start: Cursor) -> Iterator[tuple[Cursor, bytes]]:
    file.seek(start.offset)
    place = start
    while block := file.read(PIECE_BYTES):
        content = block + file.readline()
        yield place, content
        place = Cursor(place.offset + len(content), place.line + content.count(b"\n"))


def _cut_text(file: IO[bytes], start: Cursor) -> Iterator[tuple[Cursor, bytes]]:
    if start.offset == 0:
        yield start, file.read()


_CUTS = {XML: _cut_pages, LINES: _cut_lines, TEXT: _cut_text}


def _is_multistream(path: Path) -> bool:
    """Whether the second bzip2 stream of a file holds whole pages; parallel packers cut anywhere."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as packed:
            begins = _stream_begins(packed)
            first, second, third = (next(begins, None) for _ in range(3))
            if first != 0 or second is None:
                return False
            try:
                content = bz2.decompress(packed[second:third]).strip()
            except (OSError, ValueError):
                return False
    return content.startswith(PAGE_BEGIN) and content.endswith((PAGE_END, DUMP_END))


def _stream_begins(packed: mmap.mmap) -> Iterator[int]:
    block = packed.find(BLOCK_BEGIN)
    while block >= 0:
        begin = block - STREAM_HEAD_BYTES
        if begin >= 0 and STREAM_BEGIN.fullmatch(packed[begin:block]):
            yield begin
        block = packed.find(BLOCK_BEGIN, block + 1)


def _streams(path: Path, start: Cursor) -> Iterator[Piece]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as packed:
        begins = [*_stream_begins(packed), len(packed)]
        for begin, end in pairwise(begins):
            if begin >= start.offset:
                content = packed[begin:end]
                yield Piece(path=path, kind=XML, content=content, packed=True, end=Cursor(end), consumed=end)
        if DUMP_END not in bz2.decompress(packed[begins[-2] :]):
            raise ValueError("it ends in the middle of a dump: there is no </mediawiki>")
