"""Turn text into a token file that Megatron trains from: PREFIX.bin and PREFIX.idx.

    python -m script.data.prepare_corpus enwiki.xml.bz2 --tokenizer tokenizer.json --output data/wiki

Inputs are Wikipedia dumps, JSON lines or plain text (script/data/articles.py), tokenizers what script/data/encoders.py
lists. Each document becomes one sequence, ended by the tokenizer's end-of-document token; the files are written by
megatron-core's IndexedDatasetBuilder. The same input gives the same bytes, whatever the number of workers.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from script.data.articles import DEFAULT_TEXT_KEY, Article, read_articles
from script.data.command_line import InputError, Parser, existing_file, positive_int, run

if TYPE_CHECKING:
    from script.data.encoders import Encoder

logger = logging.getLogger(__name__)

DOCUMENTS_PER_BATCH = 256  # what is held in memory at a time
SUFFIXES = (".bin", ".idx")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What was written.

    Attributes:
        documents: how many.
        tokens: of all documents, their end-of-document tokens included.
        characters: of the text.
    """

    documents: int
    tokens: int
    characters: int


def write_corpus(
    articles: Iterable[Article], encoder: Encoder, prefix: Path, *, append_eod: bool = True, text: TextIO | None = None
) -> Corpus:
    """Write PREFIX.bin and PREFIX.idx, replacing both or neither.

    Args:
        articles: the documents.
        encoder: the tokenizer.
        prefix: path of the two files without their suffixes; its directory is made if need be.
        append_eod: end each document with the tokenizer's end-of-document token.
        text: also write the plain text here, as JSON lines.

    Raises:
        InputError: there is no text in the articles.
    """
    import numpy as np

    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    ending = [encoder.eod] if append_eod else []
    documents = tokens = characters = 0
    with _staged_pair(prefix) as staged:
        dtype = DType.optimal_dtype(encoder.vocab_size)
        builder = IndexedDatasetBuilder(f"{staged}.bin", dtype=dtype)
        remaining = iter(articles)
        while batch := list(islice(remaining, DOCUMENTS_PER_BATCH)):
            for article, ids in zip(batch, encoder.encode_batch([a.text for a in batch]), strict=True):
                builder.add_document(np.array(ids + ending, dtype=dtype), [len(ids) + len(ending)])
                documents, tokens = documents + 1, tokens + len(ids) + len(ending)
                characters += len(article.text)
                if text is not None:
                    text.write(article.to_json_line())
        builder.finalize(f"{staged}.idx")
        if not documents:
            raise InputError("there is no text in the input; nothing was written")
    return Corpus(documents=documents, tokens=tokens, characters=characters)


@contextmanager
def _staged_pair(prefix: Path) -> Iterator[Path]:
    """Give a temporary prefix; on success its two files take the names of `prefix`, the index last."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{prefix.name}.", suffix=".tmp", dir=prefix.parent) as directory:
        staged = Path(directory) / "corpus"
        yield staged
        for suffix in SUFFIXES:
            os.replace(f"{staged}{suffix}", f"{prefix}{suffix}")


def build_parser() -> Parser:
    """Return the command line."""
    parser = Parser(
        prog="python -m script.data.prepare_corpus",
        description="Turn text (Wikipedia dumps, JSON lines, plain text; also packed) into Megatron's .bin and .idx.",
    )
    parser.add_argument(
        "inputs", nargs="+", type=existing_file, metavar="INPUT", help=".xml[.bz2], .jsonl or text file"
    )
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json, .gguf, a sentencepiece model, or bytes")
    parser.add_argument("--output", required=True, type=Path, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--text-key", default=DEFAULT_TEXT_KEY, help="key of the text in JSON lines (default text)")
    parser.add_argument("--limit", type=positive_int, metavar="N", help="take the first N documents only")
    parser.add_argument(
        "--no-append-eod", action="store_true", help="don't end documents with the end-of-document token"
    )
    parser.add_argument("--save-text", type=Path, metavar="FILE", help="keep the plain text as JSON lines")
    parser.add_argument(
        "--workers", type=positive_int, default=os.cpu_count() or 1, help="processes (default all cores)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the corpus that the command line asks for."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    targets = [Path(f"{options.output}{suffix}") for suffix in SUFFIXES]
    targets += [options.save_text] if options.save_text else []
    present = [str(path) for path in targets if path.exists()]
    if present and not options.overwrite:
        parser.error(f"{present[0]} is there already; --overwrite replaces it")

    def program() -> None:
        from script.data.encoders import load_encoder

        encoder = load_encoder(options.tokenizer)
        read = (read_articles(path, text_key=options.text_key, workers=options.workers) for path in options.inputs)
        articles = islice(chain.from_iterable(read), options.limit)
        with _text_file(options.save_text) as text:
            corpus = write_corpus(articles, encoder, options.output, append_eod=not options.no_append_eod, text=text)
        logger.info(
            "%s: %d documents, %d tokens, %d characters (vocabulary %d, end of document %d)",
            targets[0], corpus.documents, corpus.tokens, corpus.characters, encoder.vocab_size, encoder.eod,
        )  # fmt: skip

    return run(program, parser.prog)


@contextmanager
def _text_file(path: Path | None) -> Iterator[TextIO | None]:
    """Open a file for text under a temporary name that becomes its own on success."""
    if path is None:
        yield None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with staged.open("w", encoding="utf-8") as file:
            yield file
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
