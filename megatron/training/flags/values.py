"""Converters of the trainer's flag values: each returns the value or raises argparse's error with what is allowed."""

from __future__ import annotations

import argparse
import ast
import math
import re
from collections.abc import Callable

SPLITS = 3  # training, validation, test
MOST_LAYERS = 100_000  # that a pattern of layers may name


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


def layer_pattern(text: str) -> int | list[int]:
    """A whole number >= 1, or a list of zeros and ones with `+` and `*` as in Python: ([1]*3+[0])*2.

    The list is walked as a syntax tree; nothing is evaluated.
    """
    try:
        if "[" not in text:
            value: int | list[int] = int(text)
        else:
            value = _list_of(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, RecursionError):
        value = []
    if value in (0, []) or (isinstance(value, int) and value < 1):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed: give a whole number >= 1, or a list of zeros and ones such as ([1]*3+[0])*2"
        )
    return value


def _list_of(node: ast.expr) -> list[int]:
    """The list that an expression of lists, `+` and `*` stands for.

    Raises:
        ValueError: for anything else, and for more layers than a model has.
    """
    if isinstance(node, ast.List):
        values = [each.value for each in node.elts if isinstance(each, ast.Constant) and each.value in (0, 1)]
        if len(values) == len(node.elts):
            return [int(value) for value in values]  # type: ignore[arg-type]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _list_of(node.left) + _list_of(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, ast.Constant):
        times, values = node.right.value, _list_of(node.left)
        if isinstance(times, int) and times * len(values) <= MOST_LAYERS:
            return values * times
    raise ValueError


def _number(text: str, allowed: str, holds: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and holds(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give {allowed}")
    return value
