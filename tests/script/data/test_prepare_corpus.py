"""From text to .bin and .idx, read back by megatron-core's own reader."""

import hashlib

import numpy as np
import pytest

from script.data import prepare_corpus
from script.data.encoders import BytesEncoder

EOD = BytesEncoder.eod


def _documents(prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert len(dataset.document_indices) - 1 == len(dataset)
    return [dataset[index].tolist() for index in range(len(dataset))]


def _run(*arguments):
    return prepare_corpus.main([str(argument) for argument in arguments])


def test_dump_to_tokens(dump, articles, tmp_path, capsys):
    prefix = tmp_path / "new" / "wiki"
    assert _run(dump, "--tokenizer", "bytes", "--output", prefix, "--workers", 1) == 0
    assert _documents(prefix) == [[*text.encode(), EOD] for _, text in articles]
    tokens = sum(len(text.encode()) + 1 for _, text in articles)
    assert f"wiki.bin: 2 documents, {tokens} tokens" in capsys.readouterr().err
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["wiki.bin", "wiki.idx"]


def test_several_inputs_a_limit_and_no_eod(dump, tmp_path):
    lines, plain = tmp_path / "a.jsonl", tmp_path / "b.txt"
    lines.write_text('{"text": "one"}\n{"text": "two"}\n')
    plain.write_text("three")
    inputs = (lines, plain, dump)
    options = ("--tokenizer", "bytes", "--output", tmp_path / "x", "--limit", 3, "--no-append-eod", "--workers", 1)
    assert _run(*inputs, *options) == 0
    assert _documents(tmp_path / "x") == [list(b"one"), list(b"two"), list(b"three")]


def test_same_bytes_whatever_the_workers_and_from_the_saved_text(dump, tmp_path):
    text = tmp_path / "text.jsonl"
    _run(dump, "--tokenizer", "bytes", "--output", tmp_path / "a", "--workers", 1, "--save-text", text)
    _run(dump, "--tokenizer", "bytes", "--output", tmp_path / "b", "--workers", 2)
    _run(text, "--tokenizer", "bytes", "--output", tmp_path / "c")
    for suffix in (".bin", ".idx"):
        assert len({hashlib.sha256((tmp_path / f"{n}{suffix}").read_bytes()).digest() for n in "abc"}) == 1


def test_a_file_that_is_named_twice_comes_twice(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("ab")
    _run(source, source, "--tokenizer", "bytes", "--output", tmp_path / "x", "--workers", 1)
    assert _documents(tmp_path / "x") == [[*b"ab", EOD]] * 2


def test_wide_tokens(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "7 99998"}\n{"text": "3"}\n')
    options = ("--tokenizer", "null", "--vocab-size", 99_999, "--workers", 1)
    assert _run(source, *options, "--output", tmp_path / "x") == 0
    assert np.fromfile(tmp_path / "x.bin", np.int32).tolist() == [7, 99998, 99999, 3, 99999]
    assert _documents(tmp_path / "x") == [[7, 99998, 99999], [3, 99999]]


def test_numbers_that_are_no_ids_are_named(tmp_path, capsys):
    source = tmp_path / "a.txt"
    source.write_text("7 8 nine")
    for options, message in (
        ([], "the tokenizer null needs --vocab-size"),
        (["--vocab-size", 9], "'nine' is no token"),
    ):
        assert _run(source, "--tokenizer", "null", *options, "--output", tmp_path / "x", "--workers", 1) == 1
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["a.txt"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_text_that_the_tokenizer_does_not_take_is_named_with_its_line(tmp_path, capsys, workers):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "1"}\n\n{"text": "2"}\n{"text": "3 nine"}\n')
    options = ("--tokenizer", "null", "--vocab-size", 9, "--output", tmp_path / "x", "--workers", workers)
    assert _run(source, *options) == 1
    assert f"{source}: line 4: 'nine' is no token id" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["a.jsonl"]


TOKENIZER_WITHOUT_USE = (
    ("byte-level", ("--vocab-size", 7)),
    ("bytes", ("--tiktoken-pattern", "v1")),
    ("null", ("--vocab-size", 9, "--tiktoken-num-special-tokens", 5)),
    ("tokenizer.json", ("--vocab-size", 7)),
)


@pytest.mark.parametrize(("tokenizer", "options"), TOKENIZER_WITHOUT_USE)
def test_options_that_the_tokenizer_has_no_use_for_are_refused(tmp_path, monkeypatch, capsys, tokenizer, options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "a.txt").write_text("7")
    assert _run("a.txt", "--tokenizer", tokenizer, *options, "--output", "x") == 1
    assert f"{options[-2]}: the tokenizer {tokenizer} has no use for it" in capsys.readouterr().err
    assert not [*tmp_path.glob("x*"), *tmp_path.glob(".x*")]


@pytest.mark.parametrize(
    ("text", "message"),
    [("x.bin", "x.bin is an output already"), ("x.idx", "x.idx is an output"), ("../{}/a.txt", "a.txt is an input")],
)
def test_an_output_never_takes_the_place_of_another_or_of_an_input(tmp_path, monkeypatch, capsys, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    options = ("--tokenizer", "bytes", "--output", "x", "--overwrite")
    assert _run("a.txt", *options, "--save-text", text.format(tmp_path.name)) == 1
    assert message in capsys.readouterr().err
    (tmp_path / "y.bin").write_text("text")
    assert _run("y.bin", "--tokenizer", "bytes", "--output", "y", "--overwrite") == 1
    assert "y.bin is an input" in capsys.readouterr().err
    assert {p.name: p.read_text() for p in tmp_path.iterdir() if p.is_file()} == {"a.txt": "text", "y.bin": "text"}


def test_what_is_there_is_not_replaced_unless_asked(tmp_path, capsys):
    source = tmp_path / "a.txt"
    source.write_text("new")
    (tmp_path / "x.idx").write_text("old")
    options = (source, "--tokenizer", "bytes", "--output", tmp_path / "x")
    with pytest.raises(SystemExit) as exit_:
        _run(*options)
    assert exit_.value.code == 2
    assert "x.idx is there already; --overwrite replaces it" in capsys.readouterr().err
    assert (tmp_path / "x.idx").read_text() == "old"
    assert _run(*options, "--overwrite") == 0
    assert _documents(tmp_path / "x") == [[*b"new", EOD]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "good"}\nbroken\n', "line 2 is not JSON"),
        ('{"text": "good"}\n{"text": "ab \\ud800 c"}\n', "line 2 has half a surrogate pair"),
        ('{"text": "good"}\n' + "[" * 200_000, "line 2 is not JSON"),
        ('{"text": " "}\n', "there is no text in the input"),
    ],
)
def test_a_failure_leaves_the_old_files_and_no_new_ones(tmp_path, capsys, content, message):
    old, source = tmp_path / "old.txt", tmp_path / "bad.jsonl"
    old.write_text("old")
    source.write_text(content)
    assert _run(old, "--tokenizer", "bytes", "--output", tmp_path / "x", "--save-text", tmp_path / "t.jsonl") == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    options = ("--tokenizer", "bytes", "--output", tmp_path / "x", "--save-text", tmp_path / "t.jsonl", "--overwrite")
    assert _run(source, *options) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([__file__, "--tokenizer", "bytes"], "--output"),
        ([__file__, "--tokenizer", "bytes", "--output", "x", "--workers", "0"], "'0' is not a whole number from 1"),
    ],
)
def test_wrong_usage_is_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        _run(*arguments)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_unwritable_place_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    source = tmp_path / "a.txt"
    source.write_text("text")
    assert _run(source, "--tokenizer", "bytes", "--output", tmp_path / "file" / "x") == 1
    error = capsys.readouterr().err
    assert str(tmp_path / "file") in error
    assert error.count("\n") == 1
