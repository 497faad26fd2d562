import re

import pytest

from megatron.quantscope.capture.ranges import any_in_ranges, in_ranges, parse_ranges


def test_numbers_and_ranges_are_joined_by_commas():
    assert parse_ranges("0-3,10") == ((0, 3), (10, 10))


@pytest.mark.parametrize(
    ("text", "named"),
    [*((text, text) for text in ("", "a", "3-", "-3", "3-1", "1.5", "0x1", "1 - 2")), ("1,,2", ""), ("1,x,2", "x")],
)
def test_what_is_no_range_is_named(text, named):
    with pytest.raises(ValueError, match="^" + re.escape(named) + "$"):
        parse_ranges(text)


def test_both_ends_are_inside():
    ranges = parse_ranges("2-4,7")
    assert [number for number in range(10) if in_ranges(ranges, number)] == [2, 3, 4, 7]
    assert any_in_ranges(ranges, [0, 7])
    assert not any_in_ranges(ranges, [0, 1, 5])
    assert not any_in_ranges(ranges, [])
