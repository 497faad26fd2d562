"""The tokenizer of a run: for its vocabulary size and its end-of-document token; the data is tokenised already.

A `tokenizer.json` is read by the library `tokenizers`, in milliseconds; upstream's way to it goes through transformers,
whose import takes seconds. Other types are those of `text_tokenizers`; GPT-2's files, and a Hugging Face directory
without a `tokenizer.json`, are left to upstream. Nothing is ever downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.training.data.text_tokenizers import (
    DEFAULT_TIKTOKEN_PATTERN,
    ByteLevelTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    TextTokenizer,
    TikTokenizer,
)
from megatron.training.failure import UsageError
from megatron.training.validation import set_vocabulary

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
# A model's end of document is not its end of a chat turn, which its configuration may name; these names come first.
END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")

# Megatron-LM's tokenizer type -> megatron-core's library, of those that are left to it.
LIBRARIES = {"GPT2BPETokenizer": "megatron", "HuggingFaceTokenizer": "huggingface"}
TOKENIZERS: dict[str, Callable[[argparse.Namespace], TextTokenizer]] = {
    # A checkpoint's vocabulary holds the end of document, the flag's does not.
    "NullTokenizer": lambda args: NullTokenizer(args.vocab_size - 1 if args.model_vocab_size else args.vocab_size),
    "ByteLevelTokenizer": lambda args: ByteLevelTokenizer(),
    **dict.fromkeys(
        ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"),
        lambda args: SentencePieceTokenizer(Path(args.tokenizer_model)),
    ),
    "TikTokenizer": lambda args: TikTokenizer(
        Path(args.tokenizer_model),
        pattern=args.tiktoken_pattern or DEFAULT_TIKTOKEN_PATTERN,
        special_tokens=args.tiktoken_num_special_tokens,
        vocab_size=args.vocab_size,
    ),
}


class TokenizerFile:
    """A `tokenizer.json`, with what megatron-core's datasets ask of a tokenizer.

    Attributes:
        vocab_size: Tokens, special ones included.
        eod: Id of the token that ends a document.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self.path = path
        self._tokenizer = Tokenizer.from_file(str(path))
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.eod = self._end_of_document()

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """What tells this tokenizer from others in the name of a dataset's cache."""
        return OrderedDict({"class": type(self).__qualname__, "tokenizer_path": str(self.path)})

    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def detokenize(self, ids: list[int]) -> str:
        """The text of `ids`."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _end_of_document(self) -> int:
        config = self.path.with_name(CONFIG_FILE)
        stored = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if config.is_file() else None
        configured = stored["content"] if isinstance(stored, dict) else stored
        for name in (*END_OF_DOCUMENT_NAMES, configured):
            if name is not None and (token := self._tokenizer.token_to_id(name)) is not None:
                return int(token)
        raise ValueError(f"no end-of-document token; known names: {' '.join(END_OF_DOCUMENT_NAMES)}")


def build_tokenizer(args: argparse.Namespace) -> Any:
    """The tokenizer that `args` name; sets the model's vocabulary in `args`.

    The model's vocabulary is the checkpoint's (`--use-checkpoint-args`), else `--vocab-size` (for NullTokenizer one
    more: its end of document), else the tokenizer's.

    Raises:
        UsageError: when it can not be read, or has more tokens than the model.
    """
    source = args.tokenizer_model or args.tokenizer_type
    try:
        tokenizer = _load(args)
        size = int(tokenizer.vocab_size)
    except Exception as error:  # each library has its own
        raise UsageError(
            f"--tokenizer-type {args.tokenizer_type}: {source} can not be read: {_first_line(error)}"
        ) from None
    wanted = args.model_vocab_size or (None if args.tokenizer_type == "NullTokenizer" else args.vocab_size) or size
    if size > wanted:
        raise UsageError(
            f"{source} has {size} tokens, the model's vocabulary has {wanted}; they do not belong together"
        )
    set_vocabulary(args, wanted)
    return tokenizer


def _load(args: argparse.Namespace) -> Any:
    if args.tokenizer_type in TOKENIZERS:
        return TOKENIZERS[args.tokenizer_type](args)
    if args.tokenizer_type == "HuggingFaceTokenizer":
        path = Path(args.tokenizer_model)
        path = path / TOKENIZER_FILE if path.is_dir() else path
        if path.is_file():
            return TokenizerFile(path)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a path that is no tokenizer must not become a download
    try:
        from megatron.core.tokenizers import MegatronTokenizer
    except ModuleNotFoundError:
        raise ValueError("this type needs megatron-core >= 0.15") from None

    gpt2 = args.tokenizer_type == "GPT2BPETokenizer"
    return MegatronTokenizer.from_pretrained(
        tokenizer_path="GPT2BPETokenizer" if gpt2 else args.tokenizer_model,
        metadata_path={"library": LIBRARIES[args.tokenizer_type]},
        **({"vocab_file": args.vocab_file, "merges_file": args.merge_file} if gpt2 else {}),
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
