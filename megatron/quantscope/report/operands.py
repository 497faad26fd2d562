"""quantization_analysis/: the operands that lose most, block by block and value by value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.quantscope.analysis.quantised_view import BINS_PER_BINADE, QuantisedView
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.analysis.surfaces import Surface
from megatron.quantscope.report import numbers
from megatron.quantscope.report.axes import exponent_ticks
from megatron.quantscope.report.page import new_page
from megatron.quantscope.report.panels import color_bar, note_right
from megatron.quantscope.report.style import ALARM, MISSING, MUTED, SEQUENTIAL, format_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST = 4
_LOWEST, _HIGHEST = 0.002, 0.998  # quantiles of the tiles where colours end
_ZERO_BINADES = 1.5  # height of the strip of elements that become zero


def draw_block_maps(study: Study, quant_type: str) -> Figure | None:
    """SQNR of every block of the operands that lose most."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    shown = _operands(study, quant_type)
    if not shown:
        return None
    page = new_page(
        1.2 + 2.9 * len(shown),
        3.3,
        title="Every block of the operands that lose most",
        note="SQNR in dB of blocks of 32 along the axis of the operand's first GEMM; a tile shows the worst of its "
        "blocks. A dark stripe: outliers of a row or channel leave few bits to the rest of their blocks. Grey: zeros.",
        study=study,
        quant_type=quant_type,
    )
    colors = colormaps[SEQUENTIAL].with_extremes(bad=MISSING)
    tiles = np.concatenate([view.sqnr_db[np.isfinite(view.sqnr_db)] for _, view in shown])
    norm = Normalize(*np.quantile(tiles, [_LOWEST, _HIGHEST])) if len(tiles) else Normalize(0, 1)
    grid = page.subplots(1, len(shown), squeeze=False)[0]
    for axes, (surface, view) in zip(grid, shown, strict=True):
        values = np.ma.masked_invalid(view.sqnr_db)
        style: dict[str, Any] = {"aspect": "auto", "cmap": colors, "norm": norm}
        drawn = axes.imshow(values, extent=(0, view.blocks, view.rows, 0), interpolation="nearest", **style)
        axes.grid(visible=False)
        axes.set_title(_title(surface))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel(f"block\n{_treated(view)}")
        note_right(axes, f"{view.rows} x {view.blocks} blocks, worst {float(values.min()):.0f} dB", MUTED)
    grid[0].set_ylabel("row")
    color_bar(page, drawn, list(grid), "SQNR, dB", extend="both")
    return page


def draw_pairs(study: Study, quant_type: str) -> Figure | None:
    """|x| against what the format makes of it, as counts."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    shown = _operands(study, quant_type)
    if not shown:
        return None
    page = new_page(
        1.2 + 2.9 * len(shown),
        3.3,
        title="Where values go: the original against the quantised",
        note="Counts of elements by |x| and by what the format makes of it. On the diagonal nothing changes; a spread "
        "about it is rounding, a bend at the right end saturation, and the strip at the foot holds what becomes 0.",
        study=study,
        quant_type=quant_type,
    )
    colors = colormaps[SEQUENTIAL].with_extremes(bad="white")
    most = max(float(view.pairs.max()) for _, view in shown)
    grid = page.subplots(1, len(shown), squeeze=False)[0]
    for axes, (surface, view) in zip(grid, shown, strict=True):
        drawn = _draw_pair(axes, view, LogNorm(1, max(most, 2.0)), colors)
        axes.set_title(_title(surface))
        zeros = 100 * view.pairs[0].sum() / max(1, view.pairs.sum())
        note_right(axes, f"becomes 0: {numbers.percent(float(zeros))}", ALARM if zeros >= 1 else MUTED)
        axes.set_xlabel(f"|x|\n{_treated(view)}")
    grid[0].set_ylabel("|quantised x|")
    color_bar(page, drawn, list(grid), "elements")
    return page


def _operands(study: Study, quant_type: str) -> list[tuple[Surface, QuantisedView]]:
    """The worst first; each tensor once."""
    of_type = [surface for surface in study.surfaces if surface.place.quant_type == quant_type]
    ordered = sorted(of_type, key=lambda surface: surface.place.outliers)
    once = {(surface.place.site, surface.place.layer): surface for surface in reversed(ordered)}
    shown = [(surface, surface.quantised) for surface in reversed(once.values()) if surface.quantised is not None]
    return shown[:_MOST]


def _treated(view: QuantisedView) -> str:
    return f"{format_title(view.format)}, in {view.gemm}"


def _title(surface: Surface) -> str:
    return f"{surface.place.site}, layer {surface.place.layer}"


def _draw_pair(axes: Axes, view: QuantisedView, norm: Any, colors: Any) -> Any:
    bins = view.pairs.shape[1]
    last = view.first + bins // BINS_PER_BINADE
    counts = np.ma.masked_equal(view.pairs, 0)
    style: dict[str, Any] = {"origin": "lower", "aspect": "auto", "norm": norm, "cmap": colors}
    drawn = axes.imshow(counts[1:], extent=(view.first, last, view.first, last), **style)
    foot = view.first - _ZERO_BINADES
    axes.imshow(counts[:1], extent=(view.first, last, foot, view.first - 0.3), **style)
    axes.set_xlim(view.first, last)
    axes.set_ylim(foot, last)
    ticks = exponent_ticks(view.first, last, 6)
    axes.set_xticks(ticks, [numbers.power_of_two(tick) for tick in ticks])
    axes.set_yticks([(foot + view.first) / 2, *ticks[1:]], ["0", *(numbers.power_of_two(tick) for tick in ticks[1:])])
    axes.set_box_aspect(1)
    return drawn
