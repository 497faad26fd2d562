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
    [('{"text": "good"}\nbroken\n', "line 2 is not JSON"), ('{"text": " "}\n', "there is no text in the input")],
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
