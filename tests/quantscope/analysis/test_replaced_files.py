import pytest

from megatron.quantscope.analysis.replaced_files import replaced, unfinished


def write_half(path):
    with replaced(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError


def test_what_was_written_takes_the_place_of_what_was_there(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_text("old")
    with replaced(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert list(unfinished(tmp_path, ".parquet")) == [temporary]
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_what_was_there_and_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError):
        write_half(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_only_unfinished_files_of_the_suffix_are_named(tmp_path):
    for name in ("a.parquet", ".b.txt.writing-1", ".c.parquet.writing-2"):
        (tmp_path / name).touch()
    assert [path.name for path in unfinished(tmp_path, ".parquet")] == [".c.parquet.writing-2"]
