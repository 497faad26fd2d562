"""Values that every reader understands: what goes into metadata and into a JSON line.

Metadata holds str, int, float, bool, None, list and dict only, since `torch.load(weights_only=True)` and JSON take no
more. JSON has no NaN and no infinity; a loss can be either, so non-finite numbers travel as the words that Python's
`float` reads back: "nan", "inf", "-inf".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from megatron.quantscope.capture.errors import CaptureUsageError

_ENCODER = json.JSONEncoder(allow_nan=False)


def plain(value: Any, where: str = "metadata") -> Any:
    """`value` made of built-in types only: tuples become lists, NumPy numbers Python's own.

    Args:
        value: Anything a user or a module put into metadata.
        where: What `value` is called in the error message.

    Raises:
        CaptureUsageError: for a value of any other type, and for a dict key that is not a str.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise CaptureUsageError(f"{where} has the key {key!r}: give keys of type str")
        return {key: plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise CaptureUsageError(
        f"{where} is a {type(value).__name__}: give str, int, float, bool, None, or lists and dicts of them"
    )


def to_json(value: Any) -> str:
    """`value` as one line of strict JSON, non-finite numbers as words."""
    try:
        return _ENCODER.encode(value)
    except ValueError:  # there are some, which is rare: looking for them first would take longer than all the rest
        return _ENCODER.encode(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value
