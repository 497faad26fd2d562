"""Tokenizers: their sizes, their end of document, and files that are none."""

import json

import pytest

from megatron.training.data.tokenizer import LIBRARIES, TOKENIZERS, TokenizerFile, build_tokenizer
from megatron.training.failure import UsageError

WORDS = ["a", "b", "c"]


def write_tokenizer(path, *added, words=WORDS):
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in added])
    tokenizer.save(str(path))
    return path


class TestFile:
    def test_text_and_ids(self, tmp_path):
        tokenizer = TokenizerFile(write_tokenizer(tmp_path / "tokenizer.json", "<|endoftext|>"))
        assert (tokenizer.vocab_size, tokenizer.eod) == (4, 3)
        assert tokenizer.tokenize("c a b") == [2, 0, 1]
        assert tokenizer.detokenize([2, 0, 3]).split() == ["c", "a", "<|endoftext|>"]

    @pytest.mark.parametrize("name", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"])
    def test_known_names_of_the_end_of_document(self, tmp_path, name):
        assert TokenizerFile(write_tokenizer(tmp_path / "tokenizer.json", "<s>", name)).eod == 4

    @pytest.mark.parametrize("stored", ["<|im_end|>", {"content": "<|im_end|>"}])
    def test_end_of_document_from_the_configuration(self, tmp_path, stored):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": stored}))
        assert TokenizerFile(write_tokenizer(tmp_path / "tokenizer.json", "<|im_end|>")).eod == 3
        # The end of a chat turn is not the end of a document.
        assert TokenizerFile(write_tokenizer(tmp_path / "tokenizer.json", "<|im_end|>", "<|endoftext|>")).eod == 4

    def test_identifiers_tell_files_apart(self, tmp_path):
        one, other = (TokenizerFile(write_tokenizer(tmp_path / f"{n}.json", "</s>")) for n in "12")
        assert json.dumps(one.unique_identifiers) != json.dumps(other.unique_identifiers)


class TestHuggingFace:
    def build(self, parse, path, **changes):
        return build_tokenizer(parse(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=path, **changes))

    @pytest.mark.parametrize("part", ["tokenizer.json", "."])
    def test_file_or_directory(self, parse, tmp_path, part):
        write_tokenizer(tmp_path / "tokenizer.json", "</s>")
        args = parse(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=tmp_path / part, vocab_size=None)
        assert build_tokenizer(args).vocab_size == 4
        assert (args.model_vocab_size, args.padded_vocab_size) == (4, 128)

    def test_model_may_have_more_tokens(self, parse, tmp_path):
        path = write_tokenizer(tmp_path / "tokenizer.json", "</s>")
        args = parse(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=path, vocab_size=200)
        build_tokenizer(args)
        assert (args.model_vocab_size, args.padded_vocab_size) == (200, 256)

    def test_model_must_not_have_fewer(self, parse, tmp_path):
        path = write_tokenizer(tmp_path / "tokenizer.json", "</s>")
        with pytest.raises(UsageError) as caught:
            self.build(parse, path, vocab_size=3)
        assert str(caught.value) == (f"{path} has 4 tokens, the model's vocabulary has 3; they do not belong together")

    @pytest.mark.parametrize("content", ["", "{", "{}", "GIF89a", '{"model": {"type": "unheard-of"}}'])
    def test_file_that_is_none(self, parse, tmp_path, content):
        path = tmp_path / "tokenizer.json"
        path.write_text(content)
        with pytest.raises(UsageError) as caught:
            self.build(parse, path)
        line = str(caught.value)
        assert line.startswith(f"--tokenizer-type HuggingFaceTokenizer: {path} can not be read: ")
        assert "\n" not in line

    def test_without_an_end_of_document(self, parse, tmp_path):
        path = write_tokenizer(tmp_path / "tokenizer.json")
        with pytest.raises(UsageError, match=r"no end-of-document token; known names: <\|endoftext\|>"):
            self.build(parse, path)


class TestNull:
    def test_one_more_than_the_flag_says(self, parse):
        args = parse(vocab_size=127)
        tokenizer = build_tokenizer(args)
        assert (tokenizer.vocab_size, tokenizer.eod) == (128, 127)
        assert (args.model_vocab_size, args.padded_vocab_size) == (128, 128)

    def test_with_the_vocabulary_of_a_checkpoint(self, parse):
        args = parse(vocab_size=128)
        args.model_vocab_size = 128  # as --use-checkpoint-args sets it: the end of document is in it
        tokenizer = build_tokenizer(args)
        assert (tokenizer.vocab_size, tokenizer.eod) == (128, 127)
        assert args.model_vocab_size == 128


def test_bytes(parse):
    args = parse(tokenizer_type="ByteLevelTokenizer", vocab_size=None)
    tokenizer = build_tokenizer(args)
    assert args.model_vocab_size == tokenizer.vocab_size >= 257
    assert tokenizer.tokenize("Aé") == [65, 0xC3, 0xA9]
    assert tokenizer.tokenize("a\0b\1") == [97, 98]  # 0 would end the document, 1 pad it


def test_sentencepiece(parse, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the cat sat on the mat\nthe dog sat on the log\n" * 20)
    sentencepiece.SentencePieceTrainer.Train(
        f"--input={corpus} --model_prefix={tmp_path / 'm'} --vocab_size=30 --hard_vocab_limit=false "
        "--minloglevel=2 --num_threads=1"
    )
    model = tmp_path / "m.model"
    args = parse(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model, vocab_size=None)
    own = sentencepiece.SentencePieceProcessor(model_file=str(model))
    tokenizer = build_tokenizer(args)
    assert args.model_vocab_size == own.GetPieceSize()
    assert list(tokenizer.tokenize("the cat")) == own.EncodeAsIds("the cat")


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentencepiece_that_is_none(parse, tmp_path, kind):
    path = tmp_path / "m.model"
    path.write_text("not a model")
    with pytest.raises(UsageError) as caught:
        build_tokenizer(parse(tokenizer_type=kind, tokenizer_model=path))
    assert str(caught.value).startswith(f"--tokenizer-type {kind}: {path} can not be read: ")
    assert "\n" not in str(caught.value)


def test_every_type_of_the_flag_is_known():
    from megatron.training.flags.data import TOKENIZERS as NAMES

    assert set(LIBRARIES) | set(TOKENIZERS) == set(NAMES)
