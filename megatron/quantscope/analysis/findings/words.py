"""Pieces of sentences: numbers, layers, lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron.quantscope.formats import ALIASES, FORMATS

_PLAIN_FROM, _PLAIN_TO = 1e-3, 1e7
_LEAST_PERCENT = 0.01


def number(value: float) -> str:
    """22592.0 -> "22,592"; 3.1e-07 -> "3.1e-07"."""
    if value == 0 or _PLAIN_FROM <= abs(value) < _PLAIN_TO:
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:.2g}"


def signed(value: float) -> str:
    """The same with its sign."""
    return f"+{number(value)}" if value > 0 else number(value)


def percent(value: float) -> str:
    """37.349 -> "37 %"."""
    if 0 < value < _LEAST_PERCENT:
        return f"less than {_LEAST_PERCENT:g} %"
    return f"{value:.2g} %" if value < 99.5 else f"{value:.4g} %"


def times(value: float) -> str:
    """24296.4 -> "24,300 times"."""
    rounded = float(f"{value:.3g}") if value >= 10 else value
    return f"{number(rounded)} times"


def layers(numbers: Iterable[int]) -> str:
    """[3, 4, 5, 9] -> "layers 3-5, 9"; [3] -> "layer 3"."""
    spans: list[list[int]] = []
    for layer in sorted(set(numbers)):
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"{'layer' if parts == [str(spans[0][0])] else 'layers'} {', '.join(parts)}" if spans else "no layer"


def listed(parts: Sequence[str], most: int = 4) -> str:
    """The parts as `a, b and c`; those beyond `most` are counted."""
    shown = list(parts[:most])
    if len(parts) > most:
        shown.append(f"{len(parts) - most} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}" if shown else ""


def title_of(name: str) -> str:
    """How a format or quant type is written."""
    canonical = ALIASES.get(name, name)
    return FORMATS[canonical].title if canonical in FORMATS else name


def counted(count: int, thing: str) -> str:
    """A number of things: `1 tensor`, `2 tensors`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"
