import pytest

from megatron.quantscope.columns import aligned


def test_every_column_is_as_wide_as_its_widest_cell():
    assert aligned([("a", "1", "x"), ("long", "22", "")], right=[1]) == "a      1  x\nlong  22"


def test_no_rows_are_no_text():
    assert aligned([]) == ""


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"shorter|longer"):
        aligned([("a",), ("b", "c")])
