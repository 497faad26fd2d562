"""Plain-text documents out of what texts come in: a Wikipedia dump, JSON lines, or plain text files.

A dump (.xml, .xml.bz2) is read page by page, so memory does not grow with it: articles only (namespace 0, no
redirects), in the order of the dump, their wikitext reduced to plain text by mwparserfromhell in worker processes.
JSON lines (.jsonl, .json) hold one document a line. Any other file (.txt, ...) is one document, and each of the three
may be packed with bzip2 or gzip.
"""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

from script.data.command_line import InputError

DEFAULT_TEXT_KEY = "text"
TITLE_KEY = "title"
PAGES_PER_BATCH = 256  # what is held in memory at a time
PAGES_PER_TASK = 4

_OPENERS: dict[str, Callable[[Path, str], IO[bytes]]] = {".bz2": bz2.open, ".gz": gzip.open}  # type: ignore[dict-item]


@dataclass(frozen=True)
class Article:
    """One document: its title ("" where it has none) and its text."""

    title: str
    text: str

    def to_json_line(self) -> str:
        """One line of a .jsonl file that `read_articles` reads back."""
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


def read_articles(path: Path, *, text_key: str = DEFAULT_TEXT_KEY, workers: int = 1) -> Iterator[Article]:
    """Yield the documents of a file, those without text left out.

    Args:
        path: the file; its name says what it holds, as this module's text tells.
        text_key: the key of the text in JSON lines.
        workers: processes that turn wikitext into plain text; what comes out does not depend on it.

    Raises:
        InputError: the file is not what its name says.
    """
    opener = _OPENERS.get(path.suffix, Path.open)
    suffix = Path(path.stem).suffix if path.suffix in _OPENERS else path.suffix
    try:
        with opener(path, "rb") as file:
            if suffix == ".xml":
                articles = _from_dump(file, workers)
            elif suffix in (".jsonl", ".json"):
                articles = _from_json_lines(file, text_key)
            else:
                articles = iter([Article("", file.read().decode("utf-8"))])
            yield from (article for article in articles if article.text.strip())
    except (UnicodeDecodeError, ElementTree.ParseError, EOFError, ValueError) as error:
        raise InputError(f"{path}: can not be read as {suffix or 'text'}: {error}") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


def _from_json_lines(file: Iterable[bytes], text_key: str) -> Iterator[Article]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            document: Any = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON ({error})") from error
        text = document.get(text_key) if isinstance(document, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"line {number} has no text under the key {text_key!r}")
        yield Article(str(document.get(TITLE_KEY, "")), text)


def _from_dump(file: IO[bytes], workers: int) -> Iterator[Article]:
    pages = _pages(file)
    if workers == 1:
        yield from (Article(title, plain_text(wikitext)) for title, wikitext in pages)
        return
    # spawn: forking a process that already runs threads (torch, tokenizers) may deadlock
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        while batch := list(islice(pages, PAGES_PER_BATCH)):
            titles, wikitexts = zip(*batch, strict=True)
            texts = pool.map(plain_text, wikitexts, chunksize=PAGES_PER_TASK)
            yield from map(Article, titles, texts)


def _pages(file: IO[bytes]) -> Iterator[tuple[str, str]]:
    """Yield title and wikitext of every article of a MediaWiki export."""
    events = ElementTree.iterparse(file, events=("start", "end"))
    _, root = next(events)
    for event, element in events:
        if event == "start" or not element.tag.endswith("}page"):
            continue
        if element.findtext("{*}ns") == "0" and element.find("{*}redirect") is None:
            yield element.findtext("{*}title", ""), element.findtext("{*}revision/{*}text", "")
        root.clear()  # else every page read stays in memory as a child of the root


def plain_text(wikitext: str) -> str:
    """Wikitext without its markup: templates, tables and tags go, link texts and references stay."""
    import mwparserfromhell

    return str(mwparserfromhell.parse(wikitext).strip_code())
