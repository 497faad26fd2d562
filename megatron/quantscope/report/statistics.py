"""statistics/: block scales, and the numbers of every site in one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.quantscope.analysis.aggregate import block_exponents_of, merged
from megatron.quantscope.analysis.exponents import ExponentHistogram
from megatron.quantscope.analysis.roles import SYMBOL_ORDER, site_order
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.formats.catalog import MX_BLOCK
from megatron.quantscope.report import numbers
from megatron.quantscope.report.axes import draw_exponents, set_exponent_axis, set_log_axis
from megatron.quantscope.report.page import new_page
from megatron.quantscope.report.panels import add_panels, note_right, rows_for
from megatron.quantscope.report.style import (
    ALARM,
    FAINT,
    FAMILY_COLORS,
    INK,
    MISSING,
    MUTED,
    block_format,
    format_title,
    shown_format,
)

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 4
_LEAST_PERCENT = 1e-3
_MOST_BLOCKS = 0.99  # the share whose width in binades is written into a panel
_ROW = 0.165  # inches
_NONFINITE = "NaN + Inf"


def draw_block_scales(study: Study, quant_type: str) -> Figure | None:
    """Histogram of the E8M0 scales of each kind of operand."""
    frame = study.of_type(quant_type).query("operand")
    fmt = block_format(quant_type)
    histograms = {}
    for symbol in SYMBOL_ORDER:
        maxima = block_exponents_of(frame[frame["symbol"] == symbol])
        if maxima.total:
            histograms[symbol] = ExponentHistogram(maxima.first - fmt.emax, maxima.counts)
    if not histograms:
        return None
    page = new_page(
        11.0,
        0.3 + 1.7 * rows_for(len(histograms), _COLUMNS),
        title=f"Block scales of the GEMM operands under {fmt.title}",
        note=f"Percent of the blocks of {MX_BLOCK} along the contraction axis by their E8M0 scale $2^k$, k = "
        f"floor(log2 amax) - {fmt.emax}; blocks of zeros have no scale here. A wide histogram needs a scale a block, a "
        "narrow one would do with one a tensor.",
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    panels = add_panels(page, list(histograms), _COLUMNS, sharex=True, sharey=True)
    for symbol, axes in panels.of.items():
        histogram = histograms[symbol]
        color = FAMILY_COLORS[frame.loc[frame["symbol"] == symbol, "family"].iloc[0]]
        draw_exponents(axes, histogram, histogram.total, color=color, fill=True, alpha=0.4)
        draw_exponents(axes, histogram, histogram.total, color=color, lw=1.1)
        width = f"{histogram.width_of(_MOST_BLOCKS)} binades hold {100 * _MOST_BLOCKS:g} %"
        note_right(axes, f"{numbers.count(histogram.total)} blocks, {width}", MUTED)
    lower = min(histogram.first for histogram in histograms.values()) - 1
    upper = max(histogram.first + len(histogram.counts) for histogram in histograms.values()) + 1
    set_exponent_axis(panels.first, lower, upper, count=7)
    set_log_axis(panels.first, _LEAST_PERCENT, 100)
    panels.label(x="scale", y="% of blocks")
    return page


def draw_table(study: Study, quant_type: str) -> Figure | None:
    """The numbers of every site, all layers together."""
    frame = study.of_type(quant_type)
    groups = merged(frame, "site")
    sites = sorted(groups.index, key=site_order)
    name = shown_format(quant_type).name
    page = new_page(
        11.0,
        0.2 + _ROW * (len(sites) + 1),
        title="Every site in numbers",
        note="All layers, micro-batches and ranks together; SQNR in dB, underflow and saturation under "
        f"{format_title(name)}; kurtosis is the worst tensor's.",
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    axes = page.subplots()
    columns = _columns(name)
    axes.set_axis_off()
    axes.set_xlim(0, len(columns) + 1)
    axes.set_ylim(len(sites) + 0.6, -0.6)
    axes.text(0.05, 0, "site", va="center", fontsize=7.5, fontweight="bold", color=INK)
    for place, title in enumerate(columns, start=1):
        axes.text(place + 0.95, 0, title, ha="right", va="center", fontsize=7.5, fontweight="bold", color=INK)
    for line, site in enumerate(sites, start=1):
        row = groups.loc[site]
        _write_row(axes, line, site, {title: text(row) for title, text in columns.items()}, bool(row["nonfinite"]))
        new_module = line == 1 or site.partition(".")[0] != sites[line - 2].partition(".")[0]
        axes.axhline(line - 0.5, color=FAINT if new_module else MISSING, lw=0.9 if new_module else 0.5)
    return page


def _columns(name: str) -> dict[str, Callable[[pandas.Series], str]]:
    """Title -> text of a row of merged statistics; errors are those of the treatment `name`."""
    return {
        "tensors": lambda row: str(int(row["rows"])),
        "elements": lambda row: numbers.count(row["count"]),
        "zero": lambda row: numbers.percent(row["zero_percent"]),
        _NONFINITE: lambda row: numbers.count(row["nonfinite"]),
        "amax": lambda row: numbers.magnitude(row["amax"]),
        "rms": lambda row: numbers.magnitude(row["rms"]),
        "mean": lambda row: numbers.magnitude(row["mean"]),
        "kurtosis": lambda row: numbers.magnitude(row["kurtosis"]),
        "SQNR": lambda row: numbers.decibels(row[f"{name}.sqnr_db"]),
        "underflow": lambda row: numbers.percent(row[f"{name}.underflow_percent"]),
        "saturated": lambda row: numbers.percent(row[f"{name}.saturated_percent"]),
    }


def _write_row(axes: Axes, line: int, site: str, texts: dict[str, str], alarm: bool) -> None:
    style: dict[str, Any] = {"va": "center", "fontsize": 7.2, "fontfamily": "DejaVu Sans Mono"}
    axes.text(0.05, line, site, color=INK, **style)
    for place, (title, text) in enumerate(texts.items(), start=1):
        color = ALARM if alarm and title == _NONFINITE else INK
        axes.text(place + 0.95, line, text, ha="right", color=color, **style)
