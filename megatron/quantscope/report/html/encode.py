"""Numbers and objects as the page carries them: JSON without NaN, packed so that no byte of it can be markup.

    JSON -> gzip -> base64        the whole object; the browser unpacks it by `DecompressionStream`
    image -> float16 -> base64    a tile: values times 2^-exponent, so that no gradient is lost to float16's range

What base64 holds can not end the script element that it stands in, whatever names the data has.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

DIGITS = 6
"""Significant digits of floats: more than float32 statistics of a tensor mean, half the bytes of all of them."""

_FRACTION_BITS_KEPT = 5  # of float16's 10: a tile is looked at, and gzip packs the zeros of the rest
_FRACTION_BITS = 10

Number = float | int | None


def pack(data: dict[str, Any]) -> str:
    """An object as base64 of gzip of JSON; the same object gives the same text.

    Raises:
        ValueError: there is a NaN or Inf in it, which JSON has not.
    """
    return pack_text(to_json(data))


def pack_text(text: str) -> str:
    """A text as base64 of gzip."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode("ascii")


def unpack(text: str) -> dict[str, Any]:
    """What `pack` packed."""
    result: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(text)))
    return result


def to_json(data: dict[str, Any]) -> str:
    """The JSON text, without blanks.

    Raises:
        ValueError: there is a NaN or Inf in it.
    """
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def number(value: Any) -> Number:
    """One number: whole ones exactly, others to `DIGITS`; None where it is missing or not finite."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.{DIGITS}g}")


def numbers(values: Iterable[Any]) -> list[Number]:
    """A column of numbers, each as `number` writes it."""
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=float)
    return [
        None if not finite else int(value) if whole else float(f"{value:.{DIGITS}g}")
        for value, finite, whole in zip(array.tolist(), np.isfinite(array), array == np.trunc(array), strict=True)
    ]


def sqnr(values: npt.NDArray[np.float64]) -> list[Number | str]:
    """A column of SQNR in dB: "exact" where nothing changed, "lost" where values became Inf or NaN."""
    named = {math.inf: "exact", -math.inf: "lost"}
    return [named.get(value, small) for value, small in zip(values.tolist(), numbers(values), strict=True)]


def tile(values: npt.NDArray[np.floating[Any]]) -> dict[str, Any]:
    """An image, as `{shape, values, exponent}`: the values are those of the base64 times 2^exponent.

    Finite values keep about 3 % of themselves; what is not finite stays so.
    """
    array = np.asarray(values, dtype=np.float64)
    largest = float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
    exponent = math.frexp(largest)[1] if largest else 0
    return {"shape": list(array.shape), "values": float16_text(np.ldexp(array, -exponent)), "exponent": exponent}


def float16_text(values: npt.NDArray[np.float64]) -> str:
    """Values as base64 of float16, little endian, rounded to fewer fraction bits than it has."""
    step = 1 << (_FRACTION_BITS - _FRACTION_BITS_KEPT)
    bits = values.astype("<f2").view("<u2").astype(np.uint32)
    rounded = np.where(np.isfinite(values), (bits + step // 2) // step * step, bits).astype("<u2")
    return base64.b64encode(rounded.tobytes()).decode("ascii")
