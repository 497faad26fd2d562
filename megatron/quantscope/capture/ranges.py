"""Ranges of whole numbers as users write them: `0-3,10`."""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]  # first and last, both included


def parse_ranges(text: str) -> Ranges:
    """`0-3,10` as ((0, 3), (10, 10)).

    Raises:
        ValueError: with the part that is no range.
    """
    found = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ValueError(part)
        found.append((int(first), int(last)))
    return tuple(found)


def in_ranges(ranges: Ranges, number: int) -> bool:
    """Whether one of the ranges holds the number."""
    return any(first <= number <= last for first, last in ranges)


def any_in_ranges(ranges: Ranges, numbers: Iterable[int]) -> bool:
    """Whether one of the ranges holds one of the numbers."""
    return any(in_ranges(ranges, number) for number in numbers)
