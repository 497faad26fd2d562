"""The byte-level BPE tokenizer inside a GGUF file, as a tokenizer of the library `tokenizers`.

The file holds vocabulary, merges and the kind of every token; how text is split before the merges it only names
("tokenizer.ggml.pre"), so that the splits are a table here. A tokenizer of another model or with an unknown split is
refused: a near miss would encode most text right, and some of it wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from script.data.command_line import InputError
from script.model.gguf_checkpoint import GgufCheckpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

CONTROL_TOKEN = 3
USER_DEFINED_TOKEN = 4
BYTE_LEVEL_BPE = "gpt2"

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _gpt2_words() -> PreTokenizer:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _single_digits() -> PreTokenizer:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_words()])


def _llama3_words() -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(LLAMA3_WORDS), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# tokenizer.ggml.pre -> how text is split, and whether a whole word of the vocabulary skips the merges.
SPLITS: dict[str, tuple[Callable[[], PreTokenizer], bool]] = {
    "gpt-2": (_gpt2_words, False),
    "smollm": (_single_digits, False),
    "starcoder": (_single_digits, False),
    "refact": (_single_digits, False),
    "llama-bpe": (_llama3_words, True),
}


def build_tokenizer(checkpoint: GgufCheckpoint) -> tuple[Tokenizer, str | None]:
    """Build the tokenizer of a GGUF file.

    Returns:
        The tokenizer, and what the file calls its end of sequence.

    Raises:
        InputError: it is no byte-level BPE, or its split is not known here.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    kind, split_name = checkpoint.field("tokenizer.ggml.model"), checkpoint.field("tokenizer.ggml.pre")
    if kind != BYTE_LEVEL_BPE or split_name not in SPLITS:
        raise InputError(
            f"{checkpoint.path}: tokenizer {kind!r} with split {split_name!r} is not supported, only "
            f"{BYTE_LEVEL_BPE!r} with {', '.join(SPLITS)}"
        )
    tokens: list[str] = checkpoint.field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in checkpoint.field("tokenizer.ggml.merges", [])]
    pre_tokenizer, ignore_merges = SPLITS[split_name]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, checkpoint.field("tokenizer.ggml.token_type", []), strict=False):
        if token_type == CONTROL_TOKEN:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == USER_DEFINED_TOKEN:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    eos = checkpoint.field("tokenizer.ggml.eos_token_id")
    return tokenizer, tokens[eos] if isinstance(eos, int) and eos < len(tokens) else None
