"""Plain-text documents out of what texts come in: a Wikipedia dump, JSON lines, or plain text files.

Of a dump come the articles (namespace 0, no redirects), in its order, their wikitext reduced to plain text by
mwparserfromhell. JSON lines hold one document a line. Any other file is one document. How files are cut, and how they
may be packed, stands in script/data/pieces.py.
"""

from __future__ import annotations

import bz2
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from script.data.command_line import InputError
from script.data.pieces import LINES, PAGE_BEGIN, PAGE_END, TEXT, XML, Cursor, Piece, kind_of, read_pieces

DEFAULT_TEXT_KEY = "text"
TITLE_KEY = "title"
REPLACEMENT = "\ufffd"
_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Article:
    """One document.

    Attributes:
        title: "" where it has none.
        text: of which every character can be written as UTF-8.
        line: of its file, in JSON lines; 0 in others.
    """

    title: str
    text: str
    line: int = field(default=0, compare=False)

    def to_json_line(self) -> str:
        """One line of a .jsonl file that `read_articles` reads back."""
        return json.dumps({TITLE_KEY: self.title, DEFAULT_TEXT_KEY: self.text}, ensure_ascii=False) + "\n"


def read_articles(path: Path, *, text_key: str = DEFAULT_TEXT_KEY) -> Iterator[Article]:
    """Yield the documents of a file, those without text left out.

    Args:
        path: the file; its name says what it holds, as this module's text tells.
        text_key: the key of the text in JSON lines.

    Raises:
        InputError: the file is not what its name says.
    """
    for piece in pieces_of(path):
        yield from articles_of(piece, text_key=text_key)


def pieces_of(path: Path, start: Cursor | None = None) -> Iterator[Piece]:
    """`read_pieces`, whose errors name the file.

    Raises:
        InputError: the file can not be unpacked.
        OSError: it can not be read, now.
    """
    with naming(path):
        yield from read_pieces(path, start)


def articles_of(piece: Piece, *, text_key: str = DEFAULT_TEXT_KEY) -> Iterator[Article]:
    """Yield the documents of a piece, those without text left out.

    Raises:
        InputError: the piece is not what its file's name says.
    """
    with naming(piece.path):
        content = bz2.decompress(piece.content) if piece.packed else piece.content
        articles = _READERS[piece.kind](content, piece.line, text_key)
        yield from (article for article in articles if article.text.strip())


@contextmanager
def naming(path: Path, line: int = 0) -> Iterator[None]:
    """Turn what is wrong with a file's content into one line that names the file.

    What the system says of reading it (an OSError with a number: a disk, a network file system) may be over the next
    time. It is named too, but stays an OSError, so that nobody throws away what was made of the file so far.
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {f'line {line}: ' if line else ''}{error}") from error
    except (UnicodeDecodeError, ElementTree.ParseError, EOFError, ValueError, zlib.error) as error:
        raise InputError(f"{path}: can not be read as {_name_of_kind(path)}: {error}") from error
    except OSError as error:
        if error.errno is None:  # what the decoders of bzip2 and gzip say of the content
            raise InputError(f"{path}: can not be unpacked: {error}") from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def _name_of_kind(path: Path) -> str:
    return "plain text" if kind_of(path) == TEXT else kind_of(path)


def _from_lines(content: bytes, lines_before: int, text_key: str) -> Iterator[Article]:
    for number, line in enumerate(content.split(b"\n"), start=lines_before + 1):
        if not line.strip():
            continue
        try:
            document: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not JSON ({error})") from error
        text = document.get(text_key) if isinstance(document, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"line {number} has no text under the key {text_key!r}")
        article = Article(str(document.get(TITLE_KEY, "")), text, number)
        if not _is_writable(article.title + article.text):
            raise ValueError(f"line {number} has half a surrogate pair (\\ud800 to \\udfff), which is no character")
        yield article


def _is_writable(text: str) -> bool:
    """JSON can escape the halves of surrogate pairs alone; no file, and no tokenizer, can hold them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _from_pages(content: bytes, lines_before: int, text_key: str) -> Iterator[Article]:
    begin, end = content.find(PAGE_BEGIN), content.rfind(PAGE_END)
    if begin < 0:  # what stands around the pages of a multistream dump
        return
    pages = ElementTree.fromstring(b"<pages>" + content[begin : end + len(PAGE_END)] + b"</pages>")
    for page in pages:
        if page.findtext("ns") == "0" and page.find("redirect") is None:
            yield Article(page.findtext("title", ""), plain_text(page.findtext("revision/text", "")))


def _from_text(content: bytes, lines_before: int, text_key: str) -> Iterator[Article]:
    yield Article("", content.decode("utf-8"))


_READERS: dict[str, Callable[[bytes, int, str], Iterator[Article]]] = {
    XML: _from_pages,
    LINES: _from_lines,
    TEXT: _from_text,
}


def plain_text(wikitext: str) -> str:
    """Wikitext without its markup: templates, tables and tags go, link texts and references stay.

    A reference to half a surrogate pair ("&#xD800;") becomes U+FFFD, as in browsers.
    """
    import mwparserfromhell

    plain = str(mwparserfromhell.parse(wikitext).strip_code())
    return plain if _is_writable(plain) else _SURROGATES.sub(REPLACEMENT, plain)
