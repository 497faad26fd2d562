"""Turn text into a token file that Megatron trains from: PREFIX.bin and PREFIX.idx.

    python -m script.data.prepare_corpus enwiki.xml.bz2 --tokenizer tokenizer.json --output data/wiki

Inputs are Wikipedia dumps, JSON lines or plain text (script/data/pieces.py), tokenizers what script/data/encoders.py
lists. Each document becomes one sequence, ended by the tokenizer's end-of-document token. Unpacking aside, all work is
done by as many processes as there are workers, and the same input gives the same bytes whatever their number. A run
that was stopped, at whatever moment, goes on when the same command is given again (script/data/staging.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.training.data.text_tokenizers import (
    DEFAULT_TIKTOKEN_PATTERN,
    TIKTOKEN_PATTERNS,
    TIKTOKEN_SPECIAL_TOKENS,
)
from script.data.command_line import InputError, Parser, positive_int, run
from script.data.pieces import PIECE_BYTES, Cursor, Piece
from script.data.staging import Journal, Staging, is_being_put_in_place, staging

if TYPE_CHECKING:
    from script.data.encoders import TokenizerChoice
    from script.data.encoding import Recipe

logger = logging.getLogger(__name__)

RECIPE_VERSION = 1  # raised when the same inputs and options come to give other bytes
TOKENIZER_FLAGS = {  # field of TokenizerChoice -> flag
    "vocab_size": "--vocab-size",
    "tiktoken_pattern": "--tiktoken-pattern",
    "tiktoken_special_tokens": "--tiktoken-num-special-tokens",
}
LIBRARIES = ("mwparserfromhell", "sentencepiece", "tiktoken", "tokenizers")  # their versions decide the bytes too


def prepare(
    files: Sequence[Path], recipe: Recipe, prefix: Path, *, text: Path | None, limit: int | None, workers: int
) -> Journal:
    """Write PREFIX.bin and PREFIX.idx, replacing both or neither, or go on with what an earlier run has written.

    Args:
        files: the inputs, in order.
        recipe: what decides the tokens of a document.
        prefix: path of the two files without their suffixes; its directory is made if need be.
        text: also write the plain text here, as JSON lines.
        limit: take the first so many documents only.
        workers: processes.

    Returns:
        The figures of what was written.

    Raises:
        InputError: an input can not be used, or there is no text in them.
    """
    from megatron.training.data.data_files import token_dtype
    from script.data.encoders import load_encoder

    encoder = load_encoder(recipe.tokenizer)
    with staging(prefix, text, identity(files, recipe, limit)) as store:
        if not store.journal.finished:
            _fill(store, files, recipe, limit, workers)
        if not store.journal.documents:
            raise InputError("there is no text in the input; nothing was written")
        store.finish(token_dtype(encoder.vocab_size))
        done = store.journal
    logger.info(
        "%s.bin: %d documents, %d tokens, %d characters (vocabulary %d, end of document %d)",
        prefix, done.documents, done.tokens, done.characters, encoder.vocab_size, encoder.eod,
    )  # fmt: skip
    return done


def _fill(store: Staging, files: Sequence[Path], recipe: Recipe, limit: int | None, workers: int) -> None:
    """Write what is missing of a corpus; an interrupt keeps what there is."""
    from script.data.encoding import encode_all
    from script.data.progress import ProgressLine

    before = [0]
    for path in files:
        before.append(before[-1] + path.stat().st_size)
    journal = store.journal
    done = before[journal.file] + (journal.cursor.offset if files[journal.file].suffix not in (".bz2", ".gz") else 0)
    progress = ProgressLine(before[-1], (done, journal.documents, journal.tokens))
    encoded = encode_all(_pieces(files, journal), recipe, workers)
    try:
        for piece, documents in encoded:
            room = None if limit is None else limit - store.journal.documents
            if room is not None and room < len(documents.lengths):
                documents = documents.first(room)
            store.append(documents, piece.number, piece.end)
            progress.show(before[piece.number] + piece.consumed, store.journal.documents, store.journal.tokens)
            if room is not None and room <= len(documents.lengths):
                break
    except (KeyboardInterrupt, OSError):
        with suppress(OSError):  # of a full disk; the journal before this one holds then
            store.commit()
            logger.info("stopped after %d documents: the same command goes on from there", store.journal.documents)
        raise
    finally:
        encoded.close()
        progress.end()


def _pieces(files: Sequence[Path], journal: Journal) -> Iterator[Piece]:
    from script.data.articles import pieces_of

    for number, path in enumerate(files):
        if number >= journal.file:
            start = journal.cursor if number == journal.file else Cursor()
            yield from (replace(piece, number=number) for piece in pieces_of(path, start))


def identity(files: Sequence[Path], recipe: Recipe, limit: int | None) -> str:
    """Digest of all that decides the bytes: what is in the inputs and the tokenizer's files, options, libraries."""
    options = [recipe.text_key, recipe.append_eod, recipe.keep_text, limit, RECIPE_VERSION, PIECE_BYTES]
    choice = recipe.tokenizer
    options += [choice.vocab_size, choice.tiktoken_pattern, choice.tiktoken_special_tokens]
    tokenizer = [content_digest(file) for file in choice.files()] or [choice.name]
    inputs = [[path.name, content_digest(path)] for path in files]
    versions = [_version(name) for name in LIBRARIES]
    return hashlib.sha256(json.dumps([options, tokenizer, inputs, versions]).encode()).hexdigest()


def content_digest(path: Path) -> str:
    """Digest of a file's content, as fast as it can be read."""
    import xxhash

    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(PIECE_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def build_parser() -> Parser:
    """Return the command line."""
    parser = Parser(
        prog="python -m script.data.prepare_corpus",
        description="Turn text (Wikipedia dumps, JSON lines, plain text; also packed) into Megatron's .bin and .idx. "
        "A run that was stopped goes on when the same command is given again.",
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help=".xml[.bz2], .jsonl or text file, a directory, or a pattern")
    add(
        "--tokenizer",
        required=True,
        help="tokenizer.json or its directory, .gguf, .tiktoken or Megatron's JSON vocabulary, a sentencepiece model; "
        "or bytes, byte-level, null",
    )
    add("--output", required=True, type=Path, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    add("--text-key", default="text", help="key of the text in JSON lines (default text)")
    add("--limit", type=positive_int, metavar="N", help="take the first N documents only")
    add("--no-append-eod", action="store_true", help="don't end documents with the end-of-document token")
    add("--save-text", type=Path, metavar="FILE", help="keep the plain text as JSON lines")
    add("--workers", type=positive_int, default=os.cpu_count() or 1, help="processes (default all cores)")
    add("--overwrite", action="store_true", help="replace files that are there")
    add("--vocab-size", type=positive_int, metavar="N", help="ids of the tokenizer null; all ids of a tiktoken file")
    add(
        "--tiktoken-pattern",
        choices=TIKTOKEN_PATTERNS,
        help=f"how a tiktoken file cuts text (default {DEFAULT_TIKTOKEN_PATTERN})",
    )
    add(
        "--tiktoken-num-special-tokens",
        type=positive_int,
        metavar="N",
        help=f"ids before a tiktoken file's first token (default {TIKTOKEN_SPECIAL_TOKENS})",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the corpus that the command line asks for."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    present = [str(path) for path in _targets(options) if path.exists()]
    if present and not options.overwrite and not is_being_put_in_place(options.output):
        parser.error(f"{present[0]} is there already; --overwrite replaces it")
    return run(lambda: _program(options), parser.prog)


def _targets(options: argparse.Namespace) -> list[Path]:
    return [Path(f"{options.output}.bin"), Path(f"{options.output}.idx"), *filter(None, [options.save_text])]


def _choice(options: argparse.Namespace) -> TokenizerChoice:
    """The tokenizer that the command line chooses, with options that are its own.

    Raises:
        InputError: an option is given that it has no use for; it would change nothing, without a word.
    """
    from script.data.encoders import TokenizerChoice, options_of

    given = {field: getattr(options, flag[2:].replace("-", "_")) for field, flag in TOKENIZER_FLAGS.items()}
    given = {field: value for field, value in given.items() if value is not None}
    for field in sorted(given.keys() - options_of(options.tokenizer)):
        raise InputError(f"{TOKENIZER_FLAGS[field]}: the tokenizer {options.tokenizer} has no use for it")
    return TokenizerChoice(name=options.tokenizer, **given)


def _refuse_ruin(outputs: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Two outputs in one place, or one in the place of an input, would ruin what is there without a word."""
    taken = {path.resolve(): f"{path} is an input" for path in inputs}
    for path in outputs:
        if complaint := taken.get(path.resolve()):
            raise InputError(f"{complaint}; it can not be written to")
        taken[path.resolve()] = f"{path} is an output already"


def _program(options: argparse.Namespace) -> None:
    from script.data.encoding import Recipe
    from script.data.inputs import input_files

    choice, inputs = _choice(options), input_files(options.inputs)
    _refuse_ruin(_targets(options), [*inputs, *choice.files()])
    recipe = Recipe(
        tokenizer=choice,
        text_key=options.text_key,
        append_eod=not options.no_append_eod,
        keep_text=options.save_text is not None,
    )
    prepare(
        inputs,
        recipe,
        options.output,
        text=options.save_text,
        limit=options.limit,
        workers=options.workers,
    )


if __name__ == "__main__":
    sys.exit(main())
