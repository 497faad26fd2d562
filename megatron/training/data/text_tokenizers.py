"""Tokenizers that need nothing of megatron-core: Null, ByteLevel, SentencePiece and Tik, of Megatron-LM's names.

Their ids are those of megatron-core's classes of the same libraries, whose import takes seconds and which 0.14 has not.
One thing differs, on purpose: text is text. What looks like a special token in it is encoded as its characters, so that
no document can smuggle in an end of document; upstream's TikTokenizer takes "</s>" in a text for one.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

# How TikTokenizer cuts text before it merges bytes; the names are those of --tiktoken-pattern.
TIKTOKEN_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
DEFAULT_TIKTOKEN_PATTERN = "v2"
TIKTOKEN_LARGEST_VOCABULARY = 2**17
TIKTOKEN_SPECIAL_TOKENS = 1000  # ids below the first byte's
TIKTOKEN_END = 2  # "</s>" among the special tokens "<unk>", "<s>", "</s>", ...
BYTES = 256


class TextTokenizer:
    """What megatron-core's datasets, and script/data, ask of a tokenizer.

    Attributes:
        vocab_size: Ids are below it, special tokens included.
        eod: Id of the token that ends a document.
    """

    vocab_size: int
    eod: int

    def __init__(self, **identity: object) -> None:
        self._identity = identity

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """What tells this tokenizer from others in the name of a dataset's cache."""
        return OrderedDict({"class": type(self).__qualname__} | {name: str(v) for name, v in self._identity.items()})

    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens.

        Raises:
            ValueError: the text is none that this tokenizer takes.
        """
        raise NotImplementedError


class NullTokenizer(TextTokenizer):
    """Text that is ids already, as numbers between blanks; the end of document is one more id behind them."""

    def __init__(self, ids: int) -> None:
        super().__init__(ids=ids)
        self.eod, self.vocab_size = ids, ids + 1

    def tokenize(self, text: str) -> list[int]:
        """See TextTokenizer."""
        words = text.split()
        for word in words:
            if not (word.isascii() and word.isdecimal() and int(word) < self.eod):
                raise ValueError(f"{word[:40]!r} is no token id; allowed are numbers from 0 to {self.eod - 1}")
        return [int(word) for word in words]


class ByteLevelTokenizer(TextTokenizer):
    """Every UTF-8 byte is a token. Ids 0 and 1 end a document and pad, so these two control characters are dropped."""

    vocab_size, eod, pad = 512, 0, 1

    def tokenize(self, text: str) -> list[int]:
        """See TextTokenizer."""
        return [byte for byte in text.encode("utf-8") if byte not in (self.eod, self.pad)]


class SentencePieceTokenizer(TextTokenizer):
    """A sentencepiece model file.

    Raises:
        ValueError: it is none, or has no end of sequence.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(tokenizer_path=path)
        from sentencepiece import SentencePieceProcessor

        try:
            self._processor = SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError("it is no sentencepiece model") from error
        self.vocab_size = int(self._processor.vocab_size())
        self.eod = int(self._processor.eos_id())
        if self.eod < 0:
            raise ValueError("this sentencepiece model has no end-of-sentence token")

    def tokenize(self, text: str) -> list[int]:
        """See TextTokenizer."""
        return list(self._processor.encode(text))


class TikTokenizer(TextTokenizer):
    """Byte-level merges of the library tiktoken, special tokens first.

    The file is Megatron's JSON list of {"rank", "token_bytes", ...}, or has a line "BASE64 RANK" for each token as
    tiktoken's own .tiktoken files. The ids are the ranks behind the special tokens.

    Args:
        path: the file.
        vocab_size: ids in all, beyond which the file is cut; None: as many as there are, up to 2^17 as upstream.

    Raises:
        ValueError: the file is no such vocabulary, or has fewer tokens than `vocab_size` asks for.
    """

    eod = TIKTOKEN_END

    def __init__(
        self,
        path: Path,
        *,
        pattern: str = DEFAULT_TIKTOKEN_PATTERN,
        special_tokens: int = TIKTOKEN_SPECIAL_TOKENS,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(tokenizer_path=path, pattern=pattern, special_tokens=special_tokens, vocab_size=vocab_size)
        if pattern not in TIKTOKEN_PATTERNS:
            raise ValueError(f"pattern {pattern!r} is not known, only {' and '.join(TIKTOKEN_PATTERNS)}")
        if special_tokens <= TIKTOKEN_END:
            raise ValueError(f"{special_tokens} special tokens are too few: the end of document is number {self.eod}")
        tokens = _read_ranks(path)
        largest = vocab_size or min(TIKTOKEN_LARGEST_VOCABULARY, special_tokens + len(tokens))
        kept = largest - special_tokens
        if not BYTES <= kept <= len(tokens):
            raise ValueError(
                f"a vocabulary of {largest} with {special_tokens} special tokens needs {kept} tokens of the file's "
                f"{len(tokens)}, and at least {BYTES}"
            )
        self._ranks = {token: rank + special_tokens for rank, token in enumerate(tokens[:kept])}
        self._pattern = pattern
        self._encoding: Any = None
        self.vocab_size = largest

    def tokenize(self, text: str) -> list[int]:
        """See TextTokenizer."""
        if self._encoding is None:
            try:
                import tiktoken
            except ModuleNotFoundError as error:
                raise ValueError("the package tiktoken is not installed, and this tokenizer needs it") from error
            self._encoding = tiktoken.Encoding(
                "quantscope", pat_str=TIKTOKEN_PATTERNS[self._pattern], mergeable_ranks=self._ranks, special_tokens={}
            )
        return list(self._encoding.encode_ordinary(text))


def _read_ranks(path: Path) -> list[bytes]:
    """The tokens of a file in the order of their ranks."""
    text = path.read_text(encoding="utf-8")
    try:
        if text.lstrip().startswith("["):
            rows = [(row["rank"], row["token_bytes"]) for row in json.loads(text)]
        else:
            rows = [(int(rank), token) for token, rank in (line.split() for line in text.splitlines() if line.strip())]
        tokens = [base64.b64decode(token, validate=True) for _, token in rows]
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f"it is no tiktoken vocabulary ({error})") from error
    if [rank for rank, _ in rows] != list(range(len(rows))) or len(set(tokens)) != len(tokens):
        raise ValueError("it is no tiktoken vocabulary: its ranks are not 0, 1, 2, ..., each of a token of its own")
    return tokens
