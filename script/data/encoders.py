"""Text to token ids, by whichever tokenizer a path or a word names.

| name | tokenizer | the trainer's --tokenizer-type |
|---|---|---|
| tokenizer.json, or a directory that holds one | library tokenizers | HuggingFaceTokenizer |
| MODEL.gguf | the BPE inside the file (script/model/gguf_tokenizer.py) | HuggingFaceTokenizer, of the imported model |
| NAME.tiktoken, or Megatron's JSON list of tokens | library tiktoken | TikTokenizer |
| any other file | sentencepiece | SentencePieceTokenizer, Llama2Tokenizer |
| `byte-level` | UTF-8 bytes 0..255, end of document 0 | ByteLevelTokenizer |
| `null` | the text is numbers: the ids themselves | NullTokenizer |
| `bytes` | UTF-8 bytes 0..255, end of document 256 | NullTokenizer with --vocab-size 256 |

The ids are those of the trainer's tokenizer (megatron/training/data/tokenizer.py). Text is text: what looks like a
special token in it ("<|endoftext|>") is encoded as the characters it is, so no document can smuggle in an end of
document. A model's end of document is not its end of a chat turn: the names of the former are tried first, and only
then what the tokenizer's configuration calls its end of sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megatron.training.data.text_tokenizers import (
    TIKTOKEN_SPECIAL_TOKENS,
    ByteLevelTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    TextTokenizer,
    TikTokenizer,
)
from megatron.training.data.tokenizer import CONFIG_FILE, END_OF_DOCUMENT_NAMES, TOKENIZER_FILE
from script.data.command_line import InputError
from script.data.json_file import read_json_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES, BYTE_LEVEL, NULL = "bytes", "byte-level", "null"
WORDS = (BYTES, BYTE_LEVEL, NULL)
TIKTOKEN_SUFFIX, JSON_SUFFIX = ".tiktoken", ".json"


class Encoder(Protocol):
    """Turns texts into token ids.

    Attributes:
        vocab_size: ids are below it, special tokens included.
        eod: id that ends a document.
    """

    vocab_size: int
    eod: int

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens.

        Raises:
            InputError: a text is none that the tokenizer takes.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class TokenizerChoice:
    """Which tokenizer, as the command line says.

    Attributes:
        name: a path or one of WORDS.
        vocab_size: of `null` the ids that the text may have; of tiktoken all ids.
        tiktoken_pattern: how tiktoken cuts text, v1 or v2.
        tiktoken_special_tokens: ids before tiktoken's first.
    """

    name: str
    vocab_size: int | None = None
    tiktoken_pattern: str = "v2"
    tiktoken_special_tokens: int = TIKTOKEN_SPECIAL_TOKENS

    def files(self) -> list[Path]:
        """The files that decide its ids."""
        if self.name in WORDS:
            return []
        path = _file_of(self.name)
        return [file for file in (path, path.with_name(CONFIG_FILE)) if file.is_file()]


class BytesEncoder:
    """Every UTF-8 byte is a token."""

    vocab_size = 257
    eod = 256

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See Encoder."""
        return [list(text.encode("utf-8")) for text in texts]


class TokenizersEncoder:
    """A tokenizer of the library tokenizers."""

    def __init__(self, tokenizer: Tokenizer, eod: int) -> None:
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.eod = eod

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See Encoder."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


class TextEncoder:
    """One of the trainer's own tokenizers."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size, self.eod = tokenizer.vocab_size, tokenizer.eod

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See Encoder."""
        try:
            return [self._tokenizer.tokenize(text) for text in texts]
        except ValueError as error:
            raise InputError(str(error)) from error


def load_encoder(name: str | TokenizerChoice) -> Encoder:
    """Return the tokenizer that is named.

    Raises:
        InputError: there is no such file, or no tokenizer in it.
    """
    choice = name if isinstance(name, TokenizerChoice) else TokenizerChoice(name=name)
    if choice.name == NULL and choice.vocab_size is None:
        raise InputError(f"the tokenizer {NULL} needs --vocab-size: the ids that the text may have")
    if choice.name in WORDS:
        return _BY_WORD[choice.name](choice)
    path = _existing_file_of(choice.name)
    loader = _from_tiktoken if _is_tiktoken(path) else _LOADERS.get(path.suffix, _from_sentencepiece)
    return loader(path, choice)


def options_of(name: str) -> frozenset[str]:
    """Which fields of TokenizerChoice, beside the name, the tokenizer that is named has a use for.

    Raises:
        InputError: there is no such file.
    """
    if name not in WORDS and _is_tiktoken(_existing_file_of(name)):
        return frozenset({"vocab_size", "tiktoken_pattern", "tiktoken_special_tokens"})
    return frozenset({"vocab_size"} if name == NULL else ())


_BY_WORD: dict[str, Callable[[TokenizerChoice], Encoder]] = {
    BYTES: lambda choice: BytesEncoder(),
    BYTE_LEVEL: lambda choice: TextEncoder(ByteLevelTokenizer()),
    NULL: lambda choice: TextEncoder(NullTokenizer(choice.vocab_size or 0)),
}


def _file_of(name: str) -> Path:
    path = Path(name).expanduser()
    return path / TOKENIZER_FILE if path.is_dir() else path


def _existing_file_of(name: str) -> Path:
    path = _file_of(name)
    if not path.is_file():
        raise InputError(
            f"no such tokenizer: {path}; a tokenizer.json, a .gguf, a .tiktoken, a sentencepiece model, or one of "
            f"{', '.join(WORDS)}"
        )
    return path


def _is_tiktoken(path: Path) -> bool:
    """Whether a file is a vocabulary of tiktoken: by its name, or, of JSON, because it is a list."""
    if path.suffix != JSON_SUFFIX:
        return path.suffix == TIKTOKEN_SUFFIX
    with path.open("rb") as file:
        return file.read(1) == b"["


def _from_json(path: Path, choice: TokenizerChoice) -> Encoder:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise InputError(f"{path} is no tokenizer.json: {error}") from error
    return TokenizersEncoder(tokenizer, end_of_document(tokenizer, _end_of_sequence(path.with_name(CONFIG_FILE))))


def _end_of_sequence(config: Path) -> str | None:
    """The token that a tokenizer's configuration calls the end of a sequence; None: there is none."""
    eos = read_json_object(config).get("eos_token") if config.is_file() else None
    name = eos.get("content") if isinstance(eos, dict) else eos
    if name is not None and not isinstance(name, str):
        raise InputError(f"{config}: eos_token is {name!r}, the text of a token is expected")
    return name


def _from_gguf(path: Path, choice: TokenizerChoice) -> Encoder:
    from script.model.gguf_checkpoint import GgufCheckpoint
    from script.model.gguf_tokenizer import build_tokenizer

    tokenizer, eos = build_tokenizer(GgufCheckpoint(path))
    return TokenizersEncoder(tokenizer, end_of_document(tokenizer, eos))


def _from_tiktoken(path: Path, choice: TokenizerChoice) -> Encoder:
    try:
        tokenizer = TikTokenizer(
            path,
            pattern=choice.tiktoken_pattern,
            special_tokens=choice.tiktoken_special_tokens,
            vocab_size=choice.vocab_size,
        )
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    return TextEncoder(tokenizer)


def _from_sentencepiece(path: Path, choice: TokenizerChoice) -> Encoder:
    try:
        return TextEncoder(SentencePieceTokenizer(path))
    except ValueError as error:
        raise InputError(f"{path}: no tokenizer.json, .gguf or .tiktoken by its name, and {error}") from error


def end_of_document(tokenizer: Tokenizer, eos: str | None) -> int:
    """Id of the token that ends a document; `eos` is what the configuration calls the end of a sequence."""
    for name in (*END_OF_DOCUMENT_NAMES, eos):
        if name is not None and (token := tokenizer.token_to_id(name)) is not None:
            return int(token)
    raise InputError(f"the tokenizer has no end-of-document token; known names: {' '.join(END_OF_DOCUMENT_NAMES)}")


_LOADERS: dict[str, Callable[[Path, TokenizerChoice], Encoder]] = {
    JSON_SUFFIX: _from_json,
    ".gguf": _from_gguf,
}
