"""The tokenizer inside a GGUF file."""

import pytest

from script.data.command_line import InputError
from script.data.encoders import load_encoder
from script.model.gguf_checkpoint import GgufCheckpoint
from script.model.gguf_tokenizer import SPLITS, build_tokenizer


@pytest.fixture
def checkpoint(tiny, write_gguf):
    return GgufCheckpoint(write_gguf(tiny)[0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the and", ["the", "\u0120", "and"]),
        ("and the", ["and", "\u0120the"]),
        ("12", ["1", "2"]),  # digits stand alone although "12" is a merge
        ("\u00e9", ["\u00c3", "\u00a9"]),
        ("<|im_end|>", ["<|im_end|>"]),
    ],
)
def test_tokens(checkpoint, text, expected):
    tokenizer, eos = build_tokenizer(checkpoint)
    assert tokenizer.encode(text).tokens == expected
    assert eos == "<|im_end|>"


def test_ids_are_those_of_the_file_and_survive_saving(checkpoint, tmp_path):
    from tokenizers import Tokenizer

    tokens = checkpoint.field("tokenizer.ggml.tokens")
    tokenizer, _ = build_tokenizer(checkpoint)
    assert tokenizer.get_vocab() == {token: index for index, token in enumerate(tokens)}
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "the 12 caf\u00e9s, and the rest\n"
    saved = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert saved.encode(text).ids == tokenizer.encode(text).ids
    assert saved.decode(saved.encode(text).ids) == text
    assert load_encoder(str(checkpoint.path)).encode_batch([text]) == [saved.encode(text).ids]
    assert load_encoder(str(checkpoint.path)).eod == tokens.index("<|endoftext|>")


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("gpt-2", ["It", "'s", "\u01201234", "!!"]),
        ("smollm", ["It", "'s", "\u0120", "1", "2", "3", "4", "!!"]),
        ("llama-bpe", ["It", "'s", "\u0120", "123", "4", "!!"]),
    ],
)
def test_splits(split, expected):
    pre_tokenizer, _ = SPLITS[split]
    assert [piece for piece, _ in pre_tokenizer().pre_tokenize_str("It's 1234!!")] == expected


@pytest.mark.parametrize(("field", "value"), [("tokenizer.ggml.model", "llama"), ("tokenizer.ggml.pre", "poro-chat")])
def test_other_tokenizers_are_refused(checkpoint, monkeypatch, field, value):
    real = checkpoint.field
    monkeypatch.setattr(checkpoint, "field", lambda name, default=None: value if name == field else real(name, default))
    with pytest.raises(InputError, match=f"{value}.* is not supported, only 'gpt2' with gpt-2, smollm"):
        build_tokenizer(checkpoint)
