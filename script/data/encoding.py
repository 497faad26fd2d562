"""From a piece of a file to the tokens of its documents: what a worker does, in this process or in others.

Each worker reads the tokenizer once and computes on one thread, so `n` workers take `n` cores. Pieces are handed out,
and their documents come back, in the order of the input, a few at a time; so the result does not depend on how many
workers there are, and memory not on the size of the input.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from script.data.articles import DEFAULT_TEXT_KEY, Article, articles_of, naming
from script.data.command_line import InputError
from script.data.encoders import Encoder, TokenizerChoice, load_encoder
from script.data.pieces import Piece

if TYPE_CHECKING:
    import numpy as np

AHEAD = 4  # pieces a worker that are in flight, so that none waits while an earlier one is slow
DOCUMENTS_PER_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What decides the tokens of a document.

    Attributes:
        tokenizer: see TokenizerChoice.
        text_key: key of the text in JSON lines.
        append_eod: documents end with the tokenizer's end of document.
        keep_text: their text is wanted too.
    """

    tokenizer: TokenizerChoice
    text_key: str = DEFAULT_TEXT_KEY
    append_eod: bool = True
    keep_text: bool = False


@dataclass(frozen=True)
class Documents:
    """Documents one behind the other.

    Attributes:
        tokens: of all of them, in the dtype of the token file.
        lengths: tokens of each, int32 [documents].
        characters: of the text of each, int64 [documents].
        text: a JSON line of each, if wanted.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    characters: np.ndarray
    text: list[str]

    def first(self, count: int) -> Documents:
        """The first `count` of them."""
        end = int(self.lengths[:count].sum())
        return Documents(self.tokens[:end], self.lengths[:count], self.characters[:count], self.text[:count])


def encoder_of(recipe: Recipe) -> Callable[[Piece], Documents]:
    """Return the function that turns pieces into documents.

    Raises:
        InputError: there is no such tokenizer; and from the function: the piece can not be read.
    """
    import numpy as np

    from megatron.training.data.data_files import token_dtype

    encoder = load_encoder(recipe.tokenizer)
    ending = [encoder.eod] if recipe.append_eod else []
    dtype = token_dtype(encoder.vocab_size)

    def encode(piece: Piece) -> Documents:
        articles = articles_of(piece, text_key=recipe.text_key)
        ids: list[np.ndarray] = []
        characters, text = [], []
        while batch := list(islice(articles, DOCUMENTS_PER_BATCH)):
            for article, encoded in zip(batch, _encode_batch(encoder, batch, piece.path), strict=True):
                if encoded:  # a document of nothing but its end teaches nothing
                    ids.append(np.array(encoded + ending, dtype))
                    characters.append(len(article.text))
                    text += [article.to_json_line()] if recipe.keep_text else []
        lengths = np.array([len(row) for row in ids], np.int32)
        tokens = np.concatenate(ids) if ids else np.empty(0, dtype)
        return Documents(tokens, lengths, np.array(characters, np.int64), text)

    return encode


def _encode_batch(encoder: Encoder, batch: list[Article], path: Path) -> list[list[int]]:
    """Token ids of each document; the complaint about one that the tokenizer does not take names its place."""
    try:
        return encoder.encode_batch([article.text for article in batch])
    except InputError:
        for article in batch:
            with naming(path, article.line):
                encoder.encode_batch([article.text])
        raise


def encode_all(pieces: Iterable[Piece], recipe: Recipe, workers: int) -> Iterator[tuple[Piece, Documents]]:
    """Yield each piece and its documents, in the order of the pieces.

    Raises:
        InputError: a piece can not be read.
        ChildProcessError: a worker was killed from outside.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are what is parallel here
    if workers == 1:
        encode = encoder_of(recipe)
        yield from ((piece, encode(piece)) for piece in pieces)
        return
    # spawn: forking a process that already runs threads (tokenizers) may deadlock
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _begin, (recipe,))
    running: deque[tuple[Piece, Future[Documents]]] = deque()
    waiting = iter(pieces)
    try:
        while True:
            for piece in islice(waiting, workers * AHEAD - len(running)):
                running.append((piece, pool.submit(_encode, piece)))
            if not running:
                return
            piece, future = running.popleft()
            yield piece, future.result()
    except BrokenProcessPool as error:
        raise ChildProcessError("a worker process was killed; the same command goes on from there") from error
    finally:
        pool.shutdown(cancel_futures=True)


_encode_piece: Callable[[Piece], Documents]


def _begin(recipe: Recipe) -> None:
    """Begin a worker: deaf to Ctrl-C, which is the parent's to answer, and gone when the parent is."""
    global _encode_piece
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _encode_piece = encoder_of(recipe)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(piece: Piece) -> Documents:
    return _encode_piece(piece)
