"""Text to token ids, by whichever tokenizer a path names.

| path | tokenizer |
|---|---|
| tokenizer.json, or a directory that holds one | library tokenizers |
| MODEL.gguf | the BPE inside the file (script/model/gguf_tokenizer.py) |
| any other file | sentencepiece |
| the word `bytes` | UTF-8 bytes 0..255, end of document 256: the ids of Megatron's NullTokenizer with vocabulary 256 |

Text is text: what looks like a special token in it ("<|endoftext|>") is encoded as the characters it is, so no document
can smuggle in an end of document. A model's end of document is not its end of a chat turn: the names of the former
are tried first, and only then what the tokenizer's configuration calls its end of sequence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megatron.training.tokenizer import CONFIG_FILE, END_OF_DOCUMENT_NAMES, TOKENIZER_FILE
from script.data.command_line import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = "bytes"


class Encoder(Protocol):
    """Turns texts into token ids.

    Attributes:
        vocab_size: ids are below it, special tokens included.
        eod: id that ends a document.
    """

    vocab_size: int
    eod: int

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        ...


class BytesEncoder:
    """Every UTF-8 byte is a token."""

    vocab_size = 257
    eod = 256

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See Encoder."""
        return [list(text.encode("utf-8")) for text in texts]


class TokenizersEncoder:
    """A tokenizer of the library tokenizers, which encodes a batch on all cores."""

    def __init__(self, tokenizer: Tokenizer, eod: int) -> None:
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.eod = eod

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See Encoder."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


class SentencePieceEncoder:
    """A sentencepiece model file."""

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            self._processor = SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise InputError(f"{path} is no tokenizer: neither tokenizer.json, .gguf nor sentencepiece") from error
        self.vocab_size = self._processor.vocab_size()
        self.eod = self._processor.eos_id()
        if self.eod < 0:
            raise InputError(f"{path}: this sentencepiece model has no end-of-sentence token")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See Encoder."""
        return [list(ids) for ids in self._processor.encode(list(texts))]


def load_encoder(name: str) -> Encoder:
    """Return the tokenizer that a path (or the word `bytes`) names.

    Raises:
        InputError: there is no such file, or no tokenizer in it.
    """
    if name == BYTES:
        return BytesEncoder()
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / TOKENIZER_FILE
    if not path.is_file():
        raise InputError(f"no such tokenizer: {path}; a tokenizer.json, a .gguf, a sentencepiece model or {BYTES!r}")
    return _LOADERS.get(path.suffix, SentencePieceEncoder)(path)


def _from_json(path: Path) -> Encoder:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"{path} is no tokenizer.json: {error}") from error
    config = path.with_name(CONFIG_FILE)
    eos = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if config.is_file() else None
    return TokenizersEncoder(tokenizer, end_of_document(tokenizer, eos["content"] if isinstance(eos, dict) else eos))


def _from_gguf(path: Path) -> Encoder:
    from script.model.gguf_checkpoint import GgufCheckpoint
    from script.model.gguf_tokenizer import build_tokenizer

    tokenizer, eos = build_tokenizer(GgufCheckpoint(path))
    return TokenizersEncoder(tokenizer, end_of_document(tokenizer, eos))


def end_of_document(tokenizer: Tokenizer, eos: str | None) -> int:
    """Id of the token that ends a document; `eos` is what the configuration calls the end of a sequence."""
    for name in (*END_OF_DOCUMENT_NAMES, eos):
        if name is not None and (token := tokenizer.token_to_id(name)) is not None:
            return int(token)
    raise InputError(f"the tokenizer has no end-of-document token; known names: {' '.join(END_OF_DOCUMENT_NAMES)}")


_LOADERS: dict[str, Callable[[Path], Encoder]] = {".json": _from_json, ".gguf": _from_gguf}
