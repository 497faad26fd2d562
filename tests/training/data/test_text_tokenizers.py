"""Ids of the tokenizers that need no megatron-core, against those of megatron-core's classes."""

import base64
import json
import sys

import pytest

from megatron.training.data.text_tokenizers import (
    TIKTOKEN_PATTERNS,
    ByteLevelTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
)

TEXT = "The caf\u00e9's 1234 CamelCase words,\n\n  two spaces\tand \u4f60\u597d \U0001f642!\r\n"
MERGES = ("he", "The", "Th", "ca", "fé", "café", " wo", "rds", "el", "12", "  ", "\n\n", "two", " sp", "and", "Case")


@pytest.fixture
def upstream():
    """`upstream(library, **options)` -> megatron-core's tokenizer."""
    tokenizers = pytest.importorskip("megatron.core.tokenizers", reason="megatron-core 0.14 has no tokenizers")

    def build(library, path=None, **options):
        return tokenizers.MegatronTokenizer.from_pretrained(
            tokenizer_path=path, metadata_path={"library": library}, **options
        )

    return build


@pytest.fixture
def vocabulary():
    """The 256 bytes, and longer tokens made of tokens before them."""
    return [bytes([byte]) for byte in range(256)] + [merge.encode() for merge in MERGES]


@pytest.fixture
def tiktoken_json(tmp_path, vocabulary):
    rows = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for rank, token in enumerate(vocabulary)
    ]
    (tmp_path / "vocab.json").write_text(json.dumps(rows))
    return tmp_path / "vocab.json"


@pytest.mark.parametrize("pattern", TIKTOKEN_PATTERNS)
def test_tiktoken(tiktoken_json, upstream, vocabulary, pattern):
    options = {"pattern": pattern, "vocab_size": 100 + len(vocabulary)}
    theirs = upstream("tiktoken", str(tiktoken_json), num_special_tokens=100, **options)
    ours = TikTokenizer(tiktoken_json, special_tokens=100, **options)
    assert ours.tokenize(TEXT) == theirs.tokenize(TEXT)
    assert len(ours.tokenize(TEXT)) < len(TEXT.encode())
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod)
    assert ours.eod in theirs.tokenize("</s>")
    assert ours.eod not in ours.tokenize("</s>")  # text can not end a document


def test_both_forms_of_a_tiktoken_file(tiktoken_json, tmp_path, vocabulary):
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(vocabulary))
    (tmp_path / "some.tiktoken").write_text("\n".join(lines) + "\n")
    first, second = TikTokenizer(tiktoken_json), TikTokenizer(tmp_path / "some.tiktoken")
    assert first.tokenize(TEXT) == second.tokenize(TEXT)
    assert first.vocab_size == second.vocab_size == 1000 + len(vocabulary)
    assert json.dumps(first.unique_identifiers) != json.dumps(second.unique_identifiers)


def test_without_the_package_only_tokenising_is_refused(tiktoken_json, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    tokenizer = TikTokenizer(tiktoken_json)  # a trainer reads tokens, and needs no more than its sizes
    with pytest.raises(ValueError, match="the package tiktoken is not installed"):
        tokenizer.tokenize("a")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("[1, 2]", {}, "it is no tiktoken vocabulary"),
        ("YQ== 0\nYg== 2\n", {}, "its ranks are not 0, 1, 2"),
        ("no base64 at all", {}, "it is no tiktoken vocabulary"),
        ("YQ== 0\n", {}, "needs 1 tokens of the file's 1, and at least 256"),
        (None, {"vocab_size": 5000}, "a vocabulary of 5000 with 1000 special tokens needs 4000 tokens of the file's"),
        (None, {"pattern": "v3"}, "pattern 'v3' is not known, only v1 and v2"),
        (None, {"special_tokens": 2}, "2 special tokens are too few"),
    ],
)
def test_what_is_no_tiktoken_vocabulary(tiktoken_json, content, options, message):
    if content is not None:
        tiktoken_json.write_text(content)
    with pytest.raises(ValueError, match=message):
        TikTokenizer(tiktoken_json, **options)


def test_sentencepiece(tmp_path, upstream):
    import sentencepiece

    words = ["bread and salt", "salt and bread", "caf\u00e9 42", "water bread salt 1234567890"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words), model_prefix=str(tmp_path / "m"), vocab_size=60, hard_vocab_limit=False,
        minloglevel=2,
    )  # fmt: skip
    ours, theirs = SentencePieceTokenizer(tmp_path / "m.model"), upstream("sentencepiece", str(tmp_path / "m.model"))
    for text in (TEXT, "bread</s> and  salt 42", ""):
        assert ours.tokenize(text) == list(theirs.tokenize(text))
        assert ours.eod not in ours.tokenize(text)
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod)


def test_bytes(upstream):
    ours, theirs = ByteLevelTokenizer(), upstream("byte-level")
    assert ours.tokenize(TEXT) == list(theirs.tokenize(TEXT))
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod)


def test_null(upstream):
    ours, theirs = NullTokenizer(128), upstream("null", vocab_size=128)
    assert ours.tokenize("3 127 0") == list(theirs.tokenize("3 127 0")) == [3, 127, 0]
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod) == (129, 128)


@pytest.mark.parametrize("word", ["128", "-1", "x", "1.5", "\u0663"])
def test_null_refuses_what_is_no_id(word):
    with pytest.raises(ValueError, match="is no token id; allowed are numbers from 0 to 127"):
        NullTokenizer(128).tokenize(f"1 {word}")
