"""Converters of the trainer's flag values: each returns the value or raises argparse's error with what is allowed."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

SPLITS = 3  # training, validation, test


def finite_float(text: str) -> float:
    """Any finite number."""
    return _number(text, "a number", lambda value: True)


def non_negative_float(text: str) -> float:
    """A finite number >= 0."""
    return _number(text, "a number >= 0", lambda value: value >= 0)


def fraction(text: str) -> float:
    """A number from 0 to 1."""
    return _number(text, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def split_weights(text: str) -> str:
    """Shares of training, validation and test data, such as 99,1,0.

    Launch scripts of Megatron-LM pass `'99,1,0'` with its quotes; they are dropped.
    """
    weights = text.strip("'\" ").split(",")
    numbers = [float(weight) for weight in weights if re.fullmatch(r"\s*\d+(\.\d*)?\s*", weight)]
    if len(numbers) != len(weights) or not 1 <= len(numbers) <= SPLITS or not sum(numbers) > 0 or not numbers[0] > 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed: give up to {SPLITS} weights (training, validation, test) such as 99,1,0"
        )
    return ",".join(f"{number:g}" for number in numbers)


def _number(text: str, allowed: str, holds: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and holds(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give {allowed}")
    return value
