"""distributions/: how heavy the tails are: the share of elements beyond a magnitude, on two logarithmic axes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from megatron.quantscope.analysis.aggregate import Floats, exponents_of
from megatron.quantscope.analysis.roles import site_order
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.report import numbers
from megatron.quantscope.report.axes import exponent_ticks
from megatron.quantscope.report.page import new_page
from megatron.quantscope.report.panels import add_panels, color_bar, layer_colors, rows_for
from megatron.quantscope.report.style import ALARM, FAINT, INK

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS, _MOST_SITES = 5, 20
_LOWEST, _HIGHEST = -3.0, 11.0  # binades from the rms
_LEAST = 1e-7  # of the elements
_LAPLACE, _GAUSSIAN = "Laplace", "Gaussian"


def draw_survival(study: Study, quant_type: str) -> Figure | None:
    """Survival functions of |x| / rms, a line a layer, with those of a Gaussian and a Laplacian."""
    frame = study.of_type(quant_type)
    frame = frame[frame["layer_idx"].notna() & (frame["operand"] | (frame["symbol"] == "y")) & (frame["rms"] > 0)]
    sites = sorted(frame["site"].unique(), key=site_order)[:_MOST_SITES]
    if not sites:
        return None
    page = new_page(
        1.6 + 2.2 * min(_COLUMNS, len(sites)),
        0.3 + 1.75 * rows_for(len(sites), _COLUMNS),
        title="How heavy the tails are",
        note="Share of the elements whose magnitude is beyond so many rms, exact at powers of two; a line a layer. "
        "Right of the Gaussian is a heavy tail; a line that starts low and runs on far right at the height of single "
        "elements is an outlier that holds the energy of its tensor.",
        study=study,
        quant_type=quant_type,
        frame=frame,
        legend=_legend(),
    )
    panels = add_panels(page, sites, _COLUMNS, sharex=True, sharey=True)
    colors = layer_colors(frame["layer_idx"])
    for site, axes in panels.of.items():
        _draw_references(axes)
        for layer, rows in frame[frame["site"] == site].groupby("layer_idx"):
            binades, shares = survival(rows)
            axes.plot(binades, shares, color=colors.to_rgba(layer), lw=0.8, alpha=0.9)
    axes = panels.first
    axes.set_ylim(math.log10(_LEAST), 0.3)
    decades = range(round(math.log10(_LEAST)), 1, 2)
    axes.set_yticks(list(decades), [f"$10^{{{decade}}}$" for decade in decades])
    axes.set_xlim(_LOWEST, _HIGHEST)
    ticks = exponent_ticks(_LOWEST, _HIGHEST, 6)
    axes.set_xticks(ticks, [numbers.power_of_two(tick) for tick in ticks])
    panels.label(x="|x| / rms", y="share beyond")
    color_bar(page, colors, list(panels.of.values()), "layer", aspect=40)
    return page


def survival(rows: pandas.DataFrame) -> tuple[Floats, Floats]:
    """log2 of |x| / rms, and log10 of the share of the elements of these rows at or beyond it."""
    histogram = exponents_of(rows)
    finite = float((rows["count"] - rows["nan"] - rows["inf"]).sum())
    rms = math.sqrt(rows["sum_squares"].sum() / finite)
    beyond = np.cumsum(histogram.counts[::-1])[::-1]
    binades = histogram.first + np.arange(len(beyond)) - math.log2(rms)
    with np.errstate(divide="ignore"):
        shares: Floats = np.log10(beyond / finite)
    amax = math.log2(float(rows["amax"].max())) - math.log2(rms)
    inside = binades < amax
    return np.append(binades[inside], amax), np.append(shares[inside], math.log10(1 / finite))


def _draw_references(axes: Axes) -> None:
    sizes = np.exp2(np.linspace(_LOWEST, math.log2(9.0), 80))
    gaussian = [math.log10(max(math.erfc(size / math.sqrt(2)), 1e-30)) for size in sizes]
    axes.plot(np.log2(sizes), gaussian, color=INK, lw=2.2, alpha=0.35, zorder=0)
    sizes = np.exp2(np.linspace(_LOWEST, math.log2(16.0), 80))
    axes.plot(np.log2(sizes), -math.sqrt(2) * sizes * math.log10(math.e), color=ALARM, lw=1.4, alpha=0.35, zorder=0)
    axes.axhline(0, color=FAINT, lw=0.6)


def _legend() -> list[object]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color=INK, lw=2.2, alpha=0.35, label=_GAUSSIAN),
        Line2D([], [], color=ALARM, lw=1.4, alpha=0.35, label=_LAPLACE),
    ]
