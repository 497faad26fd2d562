"""overflow_analysis/: how far the largest values are from each format's true limit, and what is clipped or lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.quantscope.analysis.aggregate import Floats, layer_matrix, merged
from megatron.quantscope.analysis.roles import FAMILIES, site_order
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.formats import FORMATS
from megatron.quantscope.report import numbers
from megatron.quantscope.report.axes import draw_format_table, draw_site_image, set_exponent_axis, set_layer_axis
from megatron.quantscope.report.page import new_page
from megatron.quantscope.report.panels import add_panels, color_bar
from megatron.quantscope.report.style import FAMILY_COLORS, FAMILY_LINES, INK, format_color, format_title, tried_formats

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LIMITED_FORMATS = {"fp16": 7.5, "fp8_e5m2": 0.0, "hifp8": -7.5, "fp8_e4m3": 0.0}
"""Formats whose limits are drawn, and by how many points their labels are moved: three of them lie in one binade."""
_HEADROOM_FORMATS = ("fp16", "hifp8", "fp8_e4m3")
_CLIPPED_FORMATS = (
    "fp16",
    "hifp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "mxfp8",
    "mxfp8_e5m2",
    "mxfp6_e2m3",
    "mxfp6_e3m2",
    "mxfp4",
)
_WIDEST_HEADROOM = 16.0  # binades
_HEADROOM_COLORS = "RdBu"  # the signed map the other way round: red is too little
_LEAST_PERCENT, _MOST_PERCENT = 1e-3, 10.0


def draw_amax_against_limits(study: Study, quant_type: str) -> Figure | None:
    """The largest magnitude of every site against the layer, with the largest value of each format."""
    frame = _numbered(study, quant_type)
    families = [f"{family}s" for family in FAMILIES if (frame["family"] == family).any()]
    if not families:
        return None
    page = new_page(
        1.5 + 3.0 * len(families),
        3.5,
        title="The largest values against each format's limit",
        note="Every line is the amax of one site. A dashed line is the largest value of a format's elements: what lies "
        "above it overflows unless a scale brings it down.",
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    panels = add_panels(page, families, len(families), sharey=True)
    for name, axes in panels.of.items():
        _draw_amax(axes, frame[frame["family"] == name.removesuffix("s")])
    lower = min(axes.get_ylim()[0] for axes in panels.of.values())
    set_exponent_axis(panels.first, lower, max(18.0, panels.first.get_ylim()[1]), axis="y")
    panels.label(x="layer", y="amax")
    for name, shift in _LIMITED_FORMATS.items():
        limit = FORMATS[name].max
        offset: dict[str, Any] = {
            "xytext": (4, shift),
            "textcoords": "offset points",
            "xycoords": ("axes fraction", "data"),
        }
        text = f"{format_title(name)} {limit:g}"
        last = panels.of[families[-1]]
        last.annotate(text, (1.0, np.log2(limit)), va="center", fontsize=7, color=format_color(name), **offset)
    return page


def draw_headroom(study: Study, quant_type: str) -> Figure | None:
    """Images of the binades between amax and the limit of formats without a scale."""
    from matplotlib.colors import Normalize

    frame = _numbered(study, quant_type)
    frame = frame[frame["operation"] != "backward"]
    if frame.empty:
        return None
    sites, layers, amax = layer_matrix(merged(frame, ["site", "layer_idx"]), "amax")
    page = new_page(
        1.6 + 3.2 * len(_HEADROOM_FORMATS),
        0.55 + 0.21 * len(sites),
        title="Headroom without a scale, forward",
        note="log2(max / amax): binades left above the largest value of a tensor. Red: it does not fit.",
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    titles = {f"{format_title(name)}: max {FORMATS[name].max:g}": FORMATS[name].max for name in _HEADROOM_FORMATS}
    panels = add_panels(page, list(titles), len(titles), sharey=True)
    norm = Normalize(-_WIDEST_HEADROOM, _WIDEST_HEADROOM)
    for title, limit in titles.items():
        headroom = np.log2(limit) - np.log2(amax)
        image = draw_site_image(panels.of[title], sites, layers, headroom, norm, _HEADROOM_COLORS)
    color_bar(page, image, list(panels.of.values()), "binades")
    return page


def draw_clipped(study: Study, quant_type: str) -> Figure | None:
    """Saturated and lost elements of each site under each format, as a table of colours."""
    from matplotlib.colors import LogNorm

    frame = study.of_type(quant_type).query("operand")
    if frame.empty or not tried_formats(frame, _CLIPPED_FORMATS):
        return None
    groups = merged(frame, "site")
    sites = sorted(groups.index, key=site_order)
    formats = tried_formats(frame, _CLIPPED_FORMATS)
    percents = np.column_stack(
        [groups[f"{name}.saturated_percent"] + groups[f"{name}.lost_percent"] for name in formats]
    )[[groups.index.get_loc(site) for site in sites]].astype(float)
    page = new_page(
        9.6,
        0.5 + 0.27 * len(sites),
        title="Operands beyond the largest value of a format",
        note="Percent of the finite elements that are clipped to it, or become Inf (FP16, HiF8). MX formats clip by "
        "their floor rule, which lets amax reach twice the scaled limit; gradients of FP16 and HiF8 after pow2-amax.",
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    axes = page.subplots()
    shown = np.where(percents > 0, np.clip(percents, _LEAST_PERCENT, _MOST_PERCENT), np.nan)

    def text(row: int, column: int) -> list[str]:
        return [numbers.percent(float(percents[row, column])).removesuffix(" %")]

    image = draw_format_table(axes, sites, formats, shown, LogNorm(_LEAST_PERCENT, _MOST_PERCENT), text)
    color_bar(page, image, axes, "% of the finite elements", shrink=0.7, extend="both")
    return page


def _numbered(study: Study, quant_type: str) -> pandas.DataFrame:
    frame = study.of_type(quant_type)
    return frame[frame["layer_idx"].notna() & (frame["amax"] > 0)]


def _draw_amax(axes: Axes, frame: pandas.DataFrame) -> None:
    family = frame["family"].iloc[0]
    sites, layers, values = layer_matrix(merged(frame, ["site", "layer_idx"]), "amax")
    for line in values:
        axes.plot(layers, np.log2(line), color=FAMILY_COLORS[family], ls=FAMILY_LINES[family], lw=0.9, alpha=0.7)
    _name_peak(axes, sites, layers, values)
    for name in _LIMITED_FORMATS:
        axes.axhline(np.log2(FORMATS[name].max), color=format_color(name), ls=(0, (5, 2)), lw=1.1)
    set_layer_axis(axes, layers)


def _name_peak(axes: Axes, sites: list[str], layers: list[int], values: Floats) -> None:
    """Write the site and the size of the largest value of a panel beside its point."""
    row, column = np.unravel_index(np.nanargmax(values), values.shape)
    left = column < len(layers) / 2
    offset: dict[str, Any] = {
        "xytext": (5 if left else -5, 1),
        "textcoords": "offset points",
        "ha": "left" if left else "right",
    }
    background = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
    text = f"{sites[row]} {numbers.magnitude(float(values[row, column]))}"
    place = (layers[column], np.log2(values[row, column]))
    axes.annotate(text, place, va="bottom", fontsize=6.5, color=INK, zorder=5, bbox=background, **offset)
