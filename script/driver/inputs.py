"""What the given paths hold, told from their names and directories alone, before anything is set up.

| path | kinds |
|---|---|
| checkpoint | Megatron directory (latest_checkpointed_iteration.txt), Hugging Face directory (config.json), .gguf |
| tokenizer | tokenizer.json or a directory that holds one, sentencepiece .model or a directory with tokenizer.model |
| data | prefix of a .bin/.idx pair (or one of the two files), any other file: text to prepare |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LATEST_FILE = "latest_checkpointed_iteration.txt"
TOKEN_FILES = (".bin", ".idx")
SENTENCEPIECE_SUFFIX = ".model"
SENTENCEPIECE_FILE = "tokenizer.model"
HUGGING_FACE_FILES = ("tokenizer.json", "tokenizer_config.json")
MEGATRON, HUGGING_FACE, GGUF = "Megatron", "Hugging Face", "GGUF"


class BadInput(Exception):
    """A path that can not be used; one line that names it and what is allowed. Exit code 2."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint and its kind: MEGATRON, HUGGING_FACE or GGUF."""

    path: Path
    kind: str


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, and the trainer's name for its kind."""

    path: Path
    kind: str


@dataclass(frozen=True)
class Data:
    """Training data: a token file's prefix, or text that is still to be turned into one."""

    path: Path
    is_text: bool


_CHECKPOINTS: tuple[tuple[str, Callable[[Path], bool]], ...] = (
    (MEGATRON, lambda path: (path / LATEST_FILE).is_file()),
    (HUGGING_FACE, lambda path: (path / "config.json").is_file() and any(path.glob("*.safetensors"))),
    (GGUF, lambda path: path.is_file() and path.suffix == ".gguf"),
)


def open_checkpoint(path: Path) -> Checkpoint:
    """Tell what a checkpoint path holds.

    Raises:
        BadInput: It is none of the kinds above.
    """
    for kind, matches in _CHECKPOINTS:
        if matches(path):
            return Checkpoint(path, kind)
    raise BadInput(
        f"--checkpoint-path: {path} holds no checkpoint; allowed: a Megatron directory (with {LATEST_FILE}), a Hugging "
        "Face directory (with config.json and *.safetensors), a .gguf file"
    )


def find_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer that a file is or a directory holds; None when there is none."""
    if path.is_dir():
        if any((path / name).is_file() for name in HUGGING_FACE_FILES):
            return Tokenizer(path, "HuggingFaceTokenizer")
        path = path / SENTENCEPIECE_FILE
    if path.is_file():
        if path.suffix == ".json":
            return Tokenizer(path, "HuggingFaceTokenizer")
        if path.suffix == SENTENCEPIECE_SUFFIX:
            return Tokenizer(path, "SentencePieceTokenizer")
    return None


def open_tokenizer(path: Path) -> Tokenizer:
    """Tell what a tokenizer path holds.

    Raises:
        BadInput: It is none of the kinds above.
    """
    tokenizer = find_tokenizer(path)
    if tokenizer is None:
        raise BadInput(
            f"--tokenizer-path: {path} holds no tokenizer; allowed: a tokenizer.json, a directory that holds one, a "
            "sentencepiece .model file"
        )
    return tokenizer


def open_data(path: Path) -> Data:
    """Tell what a data path holds.

    Raises:
        BadInput: There is neither a pair of token files nor a text file.
    """
    prefix = path.with_suffix("") if path.suffix in TOKEN_FILES else path
    present = [suffix for suffix in TOKEN_FILES if Path(f"{prefix}{suffix}").is_file()]
    if len(present) == len(TOKEN_FILES):
        return Data(prefix, is_text=False)
    if present:
        missing = next(suffix for suffix in TOKEN_FILES if suffix not in present)
        raise BadInput(f"--data-path: {prefix}{present[0]} is there, {prefix}{missing} is missing; both are needed")
    if path.is_file():
        return Data(path, is_text=True)
    raise BadInput(
        f"--data-path: {path} is no data; allowed: the prefix of a .bin/.idx pair, or a text file (.txt, .jsonl, .xml, "
        ".xml.bz2)"
    )
