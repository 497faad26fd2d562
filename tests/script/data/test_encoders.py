"""Text to ids, through each kind of tokenizer."""

import json

import pytest

from script.data.command_line import InputError
from script.data.encoders import TokenizerChoice, load_encoder

TEXTS = ["caf\u00e9 42", "", "a<|endoftext|>b"]


@pytest.fixture
def write_tokenizer(tmp_path):
    """`write_tokenizer(special_tokens, eos_token)` -> directory of a byte-level BPE without merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    def write(special_tokens=("<|endoftext|>",), eos_token=None):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate([*special_tokens, *alphabet])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        if eos_token is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
        return tmp_path

    return write


@pytest.fixture
def sentencepiece_model(tmp_path):
    import sentencepiece

    words = ["bread and salt", "salt and bread", "caf\u00e9 42", "water bread salt 1234567890"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words), model_prefix=str(tmp_path / "m"), vocab_size=60, byte_fallback=False,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return tmp_path / "m.model"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{bad", "no JSON object"),
        ("[1]", "no JSON object, but list"),
        ("[" * 200_000, "no JSON object"),
        ('{"eos_token": 3}', "eos_token is 3, the text of a token is expected"),
        ('{"eos_token": {"content": [1]}}', r"eos_token is \[1\], the text"),
    ],
)
def test_a_broken_configuration_is_named(write_tokenizer, content, message):
    directory = write_tokenizer()
    (directory / "tokenizer_config.json").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        load_encoder(str(directory))
    assert str(directory / "tokenizer_config.json") in str(caught.value)


def test_bytes():
    encoder = load_encoder("bytes")
    assert encoder.encode_batch(TEXTS) == [list(text.encode()) for text in TEXTS]
    assert (encoder.vocab_size, encoder.eod) == (257, 256)


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_tokenizer_json_or_its_directory(write_tokenizer, name):
    from tokenizers import Tokenizer

    directory = write_tokenizer()
    encoder = load_encoder(str(directory / name))
    assert (encoder.vocab_size, encoder.eod) == (257, 0)
    ids = encoder.encode_batch(TEXTS)
    assert [len(row) for row in ids] == [len(text.encode()) for text in TEXTS]
    decoder = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert [decoder.decode(row) for row in ids] == TEXTS


def test_text_can_not_end_a_document(write_tokenizer):
    encoder = load_encoder(str(write_tokenizer()))
    assert all(encoder.eod not in row for row in encoder.encode_batch(TEXTS))


@pytest.mark.parametrize(
    ("special_tokens", "eos_token", "expected"),
    [
        (("<|im_end|>", "<|endoftext|>"), "<|im_end|>", 1),  # the end of a chat turn is not the end of a document
        (("<a>", "<stop>"), "<stop>", 1),
        (("<a>", "<stop>"), {"content": "<stop>"}, 1),
        (("<s>", "</s>"), None, 1),
    ],
)
def test_end_of_document(write_tokenizer, special_tokens, eos_token, expected):
    assert load_encoder(str(write_tokenizer(special_tokens, eos_token))).eod == expected


def test_no_end_of_document_is_refused(write_tokenizer):
    with pytest.raises(InputError, match=r"no end-of-document token; known names: <\|endoftext\|>"):
        load_encoder(str(write_tokenizer(("<a>",))))


def test_sentencepiece(sentencepiece_model):
    import sentencepiece

    encoder = load_encoder(str(sentencepiece_model))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    assert encoder.encode_batch(["bread salt", "and"]) == [processor.encode("bread salt"), processor.encode("and")]
    assert encoder.vocab_size == processor.vocab_size()
    assert processor.id_to_piece(encoder.eod) == "</s>"


def test_ids_are_those_of_the_trainer(write_tokenizer, sentencepiece_model, tmp_path):
    """Of each type of tokenizer, the trainer's own gives the same ids, size and end of document."""
    import base64
    from argparse import Namespace

    from megatron.training.data.tokenizer import build_tokenizer

    ranks = (f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256))
    (tmp_path / "v.tiktoken").write_text("\n".join(ranks))
    directory = write_tokenizer()
    words = {"tokenizer_model": None, "vocab_size": None, "model_vocab_size": None, "tiktoken_pattern": None}
    words |= {"tiktoken_num_special_tokens": 1000, "make_vocab_size_divisible_by": 1, "padded_vocab_size": None}
    for kind, name, size, texts in (
        ("HuggingFaceTokenizer", str(directory), None, ["caf\u00e9 42", ""]),
        ("SentencePieceTokenizer", str(sentencepiece_model), None, ["bread and salt", ""]),
        ("Llama2Tokenizer", str(sentencepiece_model), None, ["salt  42"]),
        ("TikTokenizer", str(tmp_path / "v.tiktoken"), None, TEXTS),
        ("ByteLevelTokenizer", "byte-level", None, [*TEXTS, "a\0b"]),
        ("NullTokenizer", "null", 100, ["1 2 99", "7"]),
    ):
        args = Namespace(
            **words | {"tokenizer_type": kind, "tokenizer_model": name, "vocab_size": size},
            tensor_model_parallel_size=1,
        )
        trainer, encoder = build_tokenizer(args), load_encoder(TokenizerChoice(name=name, vocab_size=size))
        assert encoder.encode_batch(texts) == [trainer.tokenize(text) for text in texts]
        assert (encoder.vocab_size, encoder.eod) == (trainer.vocab_size, trainer.eod)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.json", None, "no such tokenizer"),
        ("tokenizer.json", b"{}", r"is no tokenizer\.json"),
        (
            "some.model",
            b"nothing of the kind",
            "no tokenizer.json, .gguf or .tiktoken by its name, and it is no sentencepiece model",
        ),
        ("some.gguf", b"nothing of the kind", "no GGUF file"),
    ],
)
def test_what_is_no_tokenizer_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load_encoder(str(path))
    assert str(path) in str(caught.value)
