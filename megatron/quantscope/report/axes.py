"""Axes as the figures share them: powers of two, layers, sites by layers, tables of colours, shaded ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron.quantscope.analysis.exponents import ExponentHistogram, spans
from megatron.quantscope.formats import Format
from megatron.quantscope.report.numbers import power_of_two
from megatron.quantscope.report.style import FAINT, INK, MISSING, MUTED, SEQUENTIAL, SPAN_COLORS, format_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.image import AxesImage

Floats = npt.NDArray[np.float64]

_TICK_STEPS = (1, 2, 4, 8, 16, 32, 64)
_LAYER_STEPS = (1, 2, 3, 4, 5, 10, 20, 25, 50, 100)
_LAYER_TICKS = 10
_LABELLED_WIDTH = 0.07  # of the axis: narrower shaded ranges have no name written in


def exponent_ticks(lower: float, upper: float, count: int) -> list[int]:
    """At most about `count` exponents between two, a power of two apart, and multiples of their distance."""
    step = next((step for step in _TICK_STEPS if (upper - lower) / step <= count), _TICK_STEPS[-1])
    return list(range(math.ceil(lower / step) * step, math.floor(upper) + 1, step))


def set_exponent_axis(axes: Axes, lower: float, upper: float, *, count: int = 8, axis: str = "x") -> None:
    """An axis whose coordinate is log2 of the magnitude, labelled in powers of two."""
    ticks = exponent_ticks(lower, upper, count)
    getattr(axes, f"set_{axis}ticks")(ticks, [power_of_two(tick) for tick in ticks])
    getattr(axes, f"set_{axis}lim")(lower, upper)


def set_log_axis(axes: Axes, lower: float, upper: float) -> None:
    """A logarithmic y axis, ticks at its powers only: minor ones are not drawn and cost a third of a figure's time."""
    from matplotlib.ticker import NullLocator

    axes.set_ylim(lower, upper)  # before the scale, which looks for data where there are no limits
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())


def spread_layers(layers: Sequence[int], count: int = _LAYER_TICKS) -> list[int]:
    """Some of the layers, evenly: at most `count` of them, always the first."""
    least = max(1, math.ceil((max(layers) - min(layers) + 1) / count))
    step = next((step for step in _LAYER_STEPS if step >= least), least)
    return [layer for layer in layers if (layer - min(layers)) % step == 0]


def set_layer_axis(axes: Axes, layers: Sequence[int]) -> None:
    """An x axis whose coordinate is the layer's number."""
    margin = 0.5 if len(layers) < _LAYER_TICKS else 0.02 * len(layers)
    axes.set_xticks(spread_layers(layers))
    axes.set_xlim(min(layers) - margin, max(layers) + margin)


def set_layer_places(axes: Axes, layers: Sequence[int], axis: str, count: int = _LAYER_TICKS) -> None:
    """Ticks of an image whose rows or columns are these layers."""
    shown = spread_layers(layers, count)
    getattr(axes, f"set_{axis}ticks")([layers.index(layer) for layer in shown], [str(layer) for layer in shown])


def draw_exponents(axes: Axes, histogram: ExponentHistogram, total: int, **style: Any) -> None:
    """A histogram of binades as steps: percent of `total` elements in each."""
    axes.stairs(100 * histogram.counts / max(1, total), histogram.edges, **style)


def shade_format(axes: Axes, fmt: Format, *, labels: bool = True) -> None:
    """Shade where a format loses values: underflow, subnormal and overflow, and name the ranges at the top."""
    lower, upper = axes.get_xlim()
    for span in spans(fmt):
        start, end = max(span.lower, lower), min(span.upper, upper)
        if end <= start:
            continue
        axes.axvspan(start, end, color=SPAN_COLORS[span.name], zorder=0, lw=0)
        if start > lower:
            axes.axvline(start, color=FAINT, lw=0.7, zorder=0.5)
        if labels and (end - start) > _LABELLED_WIDTH * (upper - lower):
            place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top"}
            axes.text((start + end) / 2, 0.985, span.name, fontsize=6.5, color=MUTED, **place)


def make_image_axes(axes: Axes) -> None:
    """No grid, no frame, no tick marks."""
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def draw_site_image(
    axes: Axes, sites: Sequence[str], layers: Sequence[int], values: Floats, norm: Normalize, cmap: str
) -> AxesImage:
    """An image of sites (rows, in the order given) by layers, modules set apart by a line."""
    from matplotlib import colormaps

    colors = colormaps[cmap].with_extremes(bad=MISSING)
    image = axes.imshow(np.ma.masked_invalid(values), aspect="auto", norm=norm, cmap=colors)
    axes.set_yticks(range(len(sites)), list(sites))
    set_layer_places(axes, layers, "x")
    axes.set_xlabel("layer")
    make_image_axes(axes)
    for row, (above, below) in enumerate(pairwise(sites)):
        if above.partition(".")[0] != below.partition(".")[0]:
            axes.axhline(row + 0.5, color="white", lw=2)
    return image


def draw_format_table(
    axes: Axes,
    sites: Sequence[str],
    formats: Sequence[str],
    shown: Floats,
    norm: Normalize,
    text: Callable[[int, int], Sequence[str]],
) -> AxesImage:
    """A table of sites by formats: coloured cells with one line of text, or a second, smaller one below it.

    Args:
        axes: Where.
        sites: Rows.
        formats: Columns.
        shown: [sites, formats]: what the colours show.
        norm: Of the colours.
        text: The lines of a cell, by row and column.
    """
    from matplotlib import colormaps

    colors = colormaps[SEQUENTIAL].with_extremes(bad=MISSING)
    image = axes.imshow(np.ma.masked_invalid(shown), aspect="auto", cmap=colors, norm=norm)
    for row, column in np.ndindex(shown.shape):
        bright = not np.isfinite(shown[row, column]) or norm(shown[row, column]) > 0.55
        style: dict[str, Any] = {"ha": "center", "va": "center", "color": INK if bright else "white"}
        first, *second = text(row, column)
        axes.text(column, row - (0.16 if second else 0), first, fontsize=7, **style)
        for line in second:
            axes.text(column, row + 0.22, line, fontsize=5.8, **style)
    axes.set_xticks(range(len(formats)), [format_title(name) for name in formats], fontsize=6.5)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(sites)), list(sites))
    make_image_axes(axes)
    return image


def label_end(axes: Axes, x: float, y: float, text: str) -> None:
    """Write a short text right of a point."""
    offset: dict[str, Any] = {"xytext": (3, 0), "textcoords": "offset points"}
    axes.annotate(text, (x, y), va="center", fontsize=7, color=INK, annotation_clip=False, **offset)
