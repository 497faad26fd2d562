"""distributions/: boxes of every operand along the depth, and how Gaussian they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron.quantscope.analysis.distribution import NORMAL_SCORES, box_statistics, score_quantiles
from megatron.quantscope.analysis.roles import site_order
from megatron.quantscope.analysis.stored_lists import has_items
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.report.axes import set_layer_axis
from megatron.quantscope.report.page import new_page
from megatron.quantscope.report.panels import add_panels, color_bar, layer_colors, rows_for
from megatron.quantscope.report.style import FAMILY_COLORS, INK, MISSING

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS, _MOST_SITES = 4, 16
_BOX_TICKS = (-1000, -100, -10, -1, 0, 1, 10, 100, 1000)
_BOX_POINTS, _HALF_BOX = 3.2, 0.3  # width of a box, in points, and half of a median's, in layers
_HIGHEST_QUANTILE = 12.0  # standard deviations


def draw_boxes(study: Study, quant_type: str) -> Figure | None:
    """Boxes of every GEMM operand against the layer, in units of its rms."""
    frame = _first_operands(study, quant_type)
    sites = sorted(frame["site"].unique(), key=site_order)[:_MOST_SITES]
    if not sites:
        return None
    page = new_page(
        1.0 + 2.9 * min(_COLUMNS, len(sites)),
        0.3 + 1.5 * rows_for(len(sites), _COLUMNS),
        title="Spread of the GEMM operands along the depth",
        note="In units of the tensor's rms, on an axis that is linear within one rms and logarithmic beyond: box 25 % "
        "to 75 %, whiskers 0.13 % to 99.87 % (3 sigma of a Gaussian), dots the extremes; one micro-batch and rank.",
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    panels = add_panels(page, sites, _COLUMNS, sharex=True, sharey=True)
    for site, axes in panels.of.items():
        _draw_boxes(axes, frame[frame["site"] == site].sort_values("layer_idx"))
    panels.first.set_yscale("symlog", linthresh=1, linscale=0.8)
    panels.first.set_yticks(_BOX_TICKS)
    panels.label(x="layer", y="x / rms")
    return page


def draw_normal_quantiles(study: Study, quant_type: str) -> Figure | None:
    """Q-Q plots against a Gaussian, one line a layer."""
    frame = _first_operands(study, quant_type)
    frame = frame[frame["std"] > 0]
    sites = sorted(frame["site"].unique(), key=site_order)[:_MOST_SITES]
    if not sites:
        return None
    page = new_page(
        1.6 + 2.4 * min(_COLUMNS, len(sites)),
        0.3 + 1.75 * rows_for(len(sites), _COLUMNS),
        title="How Gaussian the GEMM operands are",
        note="Quantiles of each tensor, in units of its standard deviation, against those of a Gaussian; a line a "
        "layer. On the grey line a tensor is Gaussian, steeper ends are heavy tails; the first micro-batch and rank.",
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    panels = add_panels(page, sites, _COLUMNS, sharex=True, sharey=True)
    colors = layer_colors(frame["layer_idx"])
    for site, axes in panels.of.items():
        axes.plot(NORMAL_SCORES, NORMAL_SCORES, color=MISSING, lw=3, zorder=0)
        for row in frame[frame["site"] == site].sort_values("layer_idx").itertuples():
            quantiles = (score_quantiles(row.quantiles) - row.mean) / row.std
            axes.plot(NORMAL_SCORES, quantiles, color=colors.to_rgba(row.layer_idx), lw=0.8, alpha=0.9)
    panels.first.set_xlim(min(NORMAL_SCORES), max(NORMAL_SCORES))
    panels.first.set_ylim(-_HIGHEST_QUANTILE, _HIGHEST_QUANTILE)
    panels.label(x="Gaussian", y="(x - mean) / std")
    color_bar(page, colors, list(panels.of.values()), "layer", aspect=40)
    return page


def _first_operands(study: Study, quant_type: str) -> pandas.DataFrame:
    """One tensor a site and layer."""
    frame = study.of_type(quant_type)
    frame = frame[frame["operand"] & frame["layer_idx"].notna() & (frame["rms"] > 0)]
    frame = frame[has_items(frame["quantiles"])]  # none of captured statistics
    return frame.drop_duplicates(["site", "layer_idx"])


def _draw_boxes(axes: Axes, rows: pandas.DataFrame) -> None:
    """Whiskers, boxes and medians as three collections of lines: a box plot of hundreds of boxes takes seconds."""
    boxes = [box_statistics(np.asarray(row.quantiles) / row.rms) for row in rows.itertuples()]
    layers = np.array([int(layer) for layer in rows["layer_idx"]])
    ends = {name: np.array([box[name] for box in boxes]) for name in boxes[0]}
    color = FAMILY_COLORS[rows["family"].iloc[0]]
    axes.vlines(layers, ends["low"], ends["high"], color=color, lw=0.7)
    axes.vlines(layers, ends["lower"], ends["upper"], color=color, lw=_BOX_POINTS, alpha=0.45)
    axes.hlines(ends["median"], layers - _HALF_BOX, layers + _HALF_BOX, color=INK, lw=0.9)
    for extreme in ("min", "max"):
        axes.plot(layers, rows[extreme] / rows["rms"], ".", ms=2.2, color=color)
    set_layer_axis(axes, list(layers))
