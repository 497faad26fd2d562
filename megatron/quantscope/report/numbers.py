"""Numbers as figures and texts write them: short, and never more exact than they are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

_THOUSAND = 1000
_COUNT_SUFFIXES = ("", " k", " M", " G", " T")
_BYTE_SUFFIXES = (" B", " kB", " MB", " GB", " TB")
_LEAST_PERCENT = 0.01
_PLAIN_FROM, _PLAIN_TO = 1e-4, 1e5


def count(value: float) -> str:
    """36912345 -> "36.9 M"."""
    return _scaled(value, _COUNT_SUFFIXES)


def size(value: float) -> str:
    """733837760 -> "734 MB"."""
    return _scaled(value, _BYTE_SUFFIXES)


def percent(value: float) -> str:
    """0.00012 -> "< 0.01 %"; an exact zero is "0 %", so that "nothing" and "little" differ."""
    if value != value:
        return "-"
    if 0 < value < _LEAST_PERCENT:
        return f"< {_LEAST_PERCENT} %"
    return f"{value:.3g} %" if value < 100 - _LEAST_PERCENT else f"{value:.5g} %"


def magnitude(value: float | None) -> str:
    """22592.0 -> "22592"; 3.1e-07 -> "3.1e-07"."""
    if value is None or value != value:
        return "-"
    if value == 0 or _PLAIN_FROM <= abs(value) < _PLAIN_TO:
        return f"{value:.4g}" if abs(value) < _PLAIN_TO / 10 else f"{value:.0f}"
    return f"{value:.2e}"


def decibels(value: float) -> str:
    """SQNR for tables: "exact" where nothing changed, "lost" where values became Inf or NaN."""
    if value != value:
        return "-"
    if math.isinf(value):
        return "exact" if value > 0 else "lost"
    return f"{value:.1f}"


def power_of_two(exponent: float) -> str:
    """A tick label in matplotlib's mathtext."""
    return f"$2^{{{exponent:g}}}$"


def facts(frame: pandas.DataFrame) -> str:
    """What every figure says of the elements it shows: how many, how many of them zero or not finite, the largest."""
    elements, zeros = int(frame["count"].sum()), int(frame["zero"].sum())
    return (
        f"n = {count(elements)}   zero {percent(100 * zeros / max(1, elements))}   NaN {count(int(frame['nan'].sum()))}"
        f"   Inf {count(int(frame['inf'].sum()))}   amax {magnitude(frame['amax'].max())}"
    )


def _scaled(value: float, suffixes: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= _THOUSAND - 0.5 and power < len(suffixes) - 1:
        value /= _THOUSAND
        power += 1
    return f"{value:.3g}{suffixes[power]}" if power else f"{value:.0f}{suffixes[0]}"
