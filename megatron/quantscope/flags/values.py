"""Converters of flag values: each returns the value or raises argparse's error with what is allowed."""

from __future__ import annotations

import argparse
import math

NO_GRAD_SCALE, POW2_AMAX = GRAD_SCALE_RULES = ("none", "pow2-amax")


def non_negative_int(text: str) -> int:
    """A whole number >= 0."""
    return _whole_number(text, smallest=0)


def positive_int(text: str) -> int:
    """A whole number >= 1."""
    return _whole_number(text, smallest=1)


def positive_float(text: str) -> float:
    """A finite number > 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give a number > 0")
    return value


def grad_scale(text: str) -> str | float:
    """`none`, `pow2-amax`, or a power of two such as 1024 or 0.5."""
    if text in GRAD_SCALE_RULES:
        return text
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0 and math.frexp(value)[0] == 0.5):  # 0.5 * 2^e: exactly a power of two
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give none, pow2-amax or a power of two")
    return value


def _whole_number(text: str, *, smallest: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = smallest - 1
    if value < smallest:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give a whole number >= {smallest}")
    return value
