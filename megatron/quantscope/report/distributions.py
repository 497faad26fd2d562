"""distributions/: exponent histograms in the range of the run's format, and how they move along the depth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.quantscope.analysis.aggregate import depths_of, exponent_image, exponents_of
from megatron.quantscope.analysis.exponents import ExponentHistogram, scaled_into_blocks
from megatron.quantscope.analysis.roles import SYMBOL_ORDER, site_order
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.formats import FORMATS, Format
from megatron.quantscope.report import numbers
from megatron.quantscope.report.axes import (
    draw_exponents,
    exponent_ticks,
    set_exponent_axis,
    set_layer_places,
    set_log_axis,
    shade_format,
)
from megatron.quantscope.report.page import new_page, span_legend
from megatron.quantscope.report.panels import Panels, add_panels, color_bar, note_right, rows_for
from megatron.quantscope.report.style import FAMILY_COLORS, MUTED, SEQUENTIAL, format_color, format_title, range_format

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 5
_MOST_SITES = 20
_LEAST_PERCENT, _MOST_PERCENT = 1e-4, 50.0
_VISIBLE_PERCENT = 1e-3  # of all elements: binades with less are cut off at the small end
_LOWEST_DEPTH = 28  # binades below emax that the panels of block formats show
_ROOM_BELOW, _ROOM_ABOVE = 12, 2  # binades beyond the limits of a format without a scale
_RULED_FORMATS = ("hifp8", "fp16")


def draw_exponent_histograms(study: Study, quant_type: str) -> Figure | None:
    """One panel a kind of tensor: its binades as the run's format sees them."""
    frame = study.of_type(quant_type)
    fmt = range_format(quant_type)
    histograms = {symbol: _as_seen(frame[frame["symbol"] == symbol], fmt) for symbol in _symbols(frame)}
    histograms = {symbol: histogram for symbol, histogram in histograms.items() if histogram.total}
    if not histograms:
        return None
    seen = "divided by their block's scale" if fmt.scale == "e8m0" else "as captured, before any scale"
    page = new_page(
        12.5,
        0.3 + 1.75 * rows_for(len(histograms), _COLUMNS),
        title=f"Distribution of every kind of tensor in the range of {fmt.title}",
        note=f"Percent of all elements by binade of |x|, {seen}; zeros, NaNs and Infs are in no binade. Shaded: what "
        f"{fmt.title} loses, or holds with fewer bits.",
        study=study,
        quant_type=quant_type,
        frame=frame,
        legend=span_legend(),
    )
    panels = add_panels(page, list(histograms), _COLUMNS, sharex=True, sharey=True)
    set_exponent_axis(panels.first, *_limits(list(histograms.values()), fmt), count=6)
    for symbol, axes in panels.of.items():
        shade_format(axes, fmt, labels=False)
        _draw_histogram(axes, histograms[symbol], frame[frame["symbol"] == symbol])
    set_log_axis(panels.first, _LEAST_PERCENT, 200)
    panels.label(x="|x| / scale" if fmt.scale == "e8m0" else "|x|", y="% of elements")
    return page


def draw_exponents_by_layer(study: Study, quant_type: str) -> Figure | None:
    """Images: binades against the layer, one panel a site."""
    frame = study.of_type(quant_type)
    frame = frame[frame["layer_idx"].notna() & (frame["operand"] | (frame["symbol"] == "y"))]
    sites = sorted(frame["site"].unique(), key=site_order)[:_MOST_SITES]
    total = exponents_of(frame[frame["site"].isin(sites)])
    if not total.total:
        return None
    visible = np.flatnonzero(100 * total.counts >= _VISIBLE_PERCENT * total.total)
    binades = range(total.first + int(visible[0]), total.first + len(total.counts))
    page = new_page(
        12.5,
        0.3 + 1.8 * rows_for(len(sites), _COLUMNS),
        title="How distributions move along the depth",
        note="Colour: percent of the elements of a layer in each binade of |x|, as captured. Dashed: the largest and "
        f"the smallest value of {' and '.join(format_title(name) for name in _RULED_FORMATS)}.",
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    panels = add_panels(page, sites, _COLUMNS, sharey=True)
    _draw_images(page, panels, frame, binades)
    ticks = exponent_ticks(binades.start, binades.stop, 7)
    panels.first.set_yticks(ticks, [numbers.power_of_two(tick) for tick in ticks])
    panels.label(x="layer", y="|x|")
    return page


def _symbols(frame: pandas.DataFrame) -> list[str]:
    present = set(frame["symbol"])
    known = [symbol for symbol in SYMBOL_ORDER if symbol in present]
    return known + sorted(present - set(known))


def _as_seen(frame: pandas.DataFrame, fmt: Format) -> ExponentHistogram:
    depths = depths_of(frame)
    return scaled_into_blocks(depths, fmt) if fmt.scale == "e8m0" and len(depths) else exponents_of(frame)


def _limits(histograms: list[ExponentHistogram], fmt: Format) -> tuple[float, float]:
    if fmt.scale == "e8m0":
        return fmt.emax - _LOWEST_DEPTH, fmt.emax + _ROOM_ABOVE + 0.5
    lower = min(histogram.first for histogram in histograms)
    upper = max(histogram.first + len(histogram.counts) for histogram in histograms)
    smallest, largest = np.log2(fmt.min_subnormal), np.log2(fmt.max)
    return max(lower, smallest - _ROOM_BELOW), max(upper, largest + _ROOM_ABOVE)


def _draw_histogram(axes: Axes, histogram: ExponentHistogram, rows: pandas.DataFrame) -> None:
    color, total = FAMILY_COLORS[rows["family"].iloc[0]], int(rows["count"].sum())
    draw_exponents(axes, histogram, total, color=color, fill=True, alpha=0.35)
    draw_exponents(axes, histogram, total, color=color, lw=1.1)
    zeros = numbers.percent(100 * rows["zero"].sum() / max(1, total))
    note_right(axes, f"n = {numbers.count(total)}   zero {zeros}", MUTED)


def _draw_images(page: Figure, panels: Panels, frame: pandas.DataFrame, binades: range) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    colors = colormaps[SEQUENTIAL].with_extremes(bad="white")
    style: dict[str, Any] = {"origin": "lower", "aspect": "auto", "cmap": colors}
    for site, axes in panels.of.items():
        layers, image = exponent_image(frame[frame["site"] == site], binades)
        extent = (-0.5, len(layers) - 0.5, binades.start, binades.stop)
        drawn = axes.imshow(image, norm=LogNorm(_LEAST_PERCENT, _MOST_PERCENT), extent=extent, **style)
        for name in _RULED_FORMATS:
            for limit in (FORMATS[name].max, FORMATS[name].min_subnormal):
                axes.axhline(np.log2(limit), color=format_color(name), ls=(0, (4, 2)), lw=0.9)
        set_layer_places(axes, layers, "x", count=6)
        axes.grid(visible=False)
    color_bar(
        page, drawn, list(panels.of.values()), "% of the elements of the layer", aspect=40, pad=0.01, extend="both"
    )
