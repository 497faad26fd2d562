"""Blends from the text to the samples: how many come from each source, counted by the tokens in them."""

import json

import pytest

from megatron.training.failure import UsageError
from script.data import prepare_corpus

SAMPLES, LENGTH = 120, 16
pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def prefixes(tmp_path):
    """Three corpora that prepare_corpus made of numbers: every token of the n-th is n * 100 + 0..49."""

    def prepare(part):
        source = tmp_path / f"{part}.jsonl"
        words = " ".join(str(part * 100 + number) for number in range(50))
        source.write_text((json.dumps({"text": words}) + "\n") * 40)
        options = [
            "--tokenizer",
            "null",
            "--vocab-size",
            "60000",
            "--workers",
            "1",
            "--output",
            str(tmp_path / f"p{part}"),
        ]
        assert prepare_corpus.main([str(source), *options]) == 0
        return str(tmp_path / f"p{part}")

    return [prepare(part) for part in range(3)]


def shares(dataset, count=SAMPLES):
    """How many of the first samples come from each source; each sample comes from one alone."""
    found = [0, 0, 0]
    for index in range(count):
        parts = {int(token) // 100 for token in dataset[index]["tokens"] if token < 60000}
        assert len(parts) == 1
        found[parts.pop()] += 1
    return found


def test_where_the_samples_of_a_blend_come_from(build_data, prefixes, tmp_path):
    first, second, third = prefixes
    blend = ["0.5", first, "0.3", second, "0.2", third]
    (tmp_path / "blend.txt").write_text("0.5 {}\n0.3 {}\n0.2 {}\n".format(*prefixes))
    splits = {"train": ["3", first, "1", third], "valid": second, "test": None}
    (tmp_path / "splits.json").write_text(json.dumps(splits))
    expected = [SAMPLES // 2, SAMPLES * 3 // 10, SAMPLES // 5]
    for flags in ({"data_path": blend, "split": "1"}, {"data_args_path": tmp_path / "blend.txt", "split": "1"}):
        _, data = build_data(**flags, train_iters=SAMPLES)
        assert shares(data.train) == pytest.approx(expected, abs=1)
    _, data = build_data(per_split_data_args_path=tmp_path / "splits.json", train_iters=SAMPLES, eval_iters=8)
    assert shares(data.train) == pytest.approx([90, 0, 30], abs=1)
    assert shares(data.valid, 8) == [0, 8, 0]
    assert data.test is None
    _, data = build_data(train_data_path=[first], valid_data_path=["2", second, "2", third], eval_iters=8)
    assert shares(data.train, 4) == [4, 0, 0]
    assert shares(data.valid, 8) == pytest.approx([0, 4, 4], abs=1)


def test_mock_data_needs_no_files(build_data):
    _, data = build_data(mock_data=True, train_iters=4)
    assert len({tuple(data.train[index]["tokens"].tolist()) for index in range(4)}) == 4


@pytest.mark.parametrize(
    ("flag", "content", "message"),
    [
        ("data_args_path", None, r"^--data-args-path: \S+ can not be read: No such file or directory$"),
        ("data_args_path", b"\xff", "is not UTF-8 text: invalid start byte at byte 0"),
        ("data_args_path", " \n", "names no data"),
        ("per_split_data_args_path", "{", "is not JSON"),
        ("per_split_data_args_path", '{"training": []}', "is not a JSON object with train, valid, test"),
        ("per_split_data_args_path", '{"train": 3}', "train is neither a list nor a string"),
    ],
)
def test_a_file_that_is_no_blend(parse, tmp_path, flag, content, message):
    if content is not None:
        (tmp_path / "f").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=message):
        parse(mock_data=None, **{flag: tmp_path / "f"})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"data_args_path": "f", "data_path": "d"}, "--data-args-path stands in place of --data-path"),
        ({"per_split_data_args_path": "f", "valid_data_path": "d"}, "stands in place of --valid-data-path"),
    ],
)
def test_what_a_file_takes_the_place_of(parse, flags, message):
    with pytest.raises(UsageError, match=message):
        parse(mock_data=None, **flags)
