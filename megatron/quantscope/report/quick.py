"""quick_analysis.png: the whole capture on one sheet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.quantscope.analysis.aggregate import depths_of, exponents_of
from megatron.quantscope.analysis.blocks import DEPTHS
from megatron.quantscope.analysis.exponents import precision_bands, scaled_into_blocks
from megatron.quantscope.analysis.roles import FAMILIES
from megatron.quantscope.analysis.shares import shares
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.formats import FORMATS, Format
from megatron.quantscope.report import numbers
from megatron.quantscope.report.axes import draw_exponents, set_exponent_axis, set_log_axis, shade_format
from megatron.quantscope.report.page import new_page
from megatron.quantscope.report.style import (
    ALARM,
    FAMILY_COLORS,
    FAMILY_LINES,
    INK,
    MUTED,
    SHOWN_FORMATS,
    block_format,
    format_color,
    format_marker,
    format_title,
    range_format,
    tried_formats,
)

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from megatron.quantscope.analysis.findings import Finding

_LEAST_PERCENT, _MOST_PERCENT = 1e-6, 200.0  # of the elements: the log axis of a histogram
_TAIL_PERCENT = 2e-5  # binades that hold less are cut off at the small end
_RULED_FORMATS = ("fp8_e4m3", "fp8_e5m2", "hifp8", "fp16", "bf16")  # from below
_LEAST_BAR, _MOST_BAR = 0.18, 0.8  # heights of a range without and with all fraction bits
_SHARES = (("quant_type", "by quant type"), ("layer_type", "by layer type"), ("operation", "by operation"))
_FEWEST_BARS, _MOST_BARS = 4, 6
_MOST_FINDINGS, _FINDING_LINE = 6, 0.17  # inches
_TOP_ROW, _BOTTOM_ROW = 4.1, 2.65
_HIGHEST_SQNR = 60.0  # dB: what keeps more is as good as exact

Families = dict[str, "pandas.DataFrame"]


def draw_quick_analysis(study: Study) -> Figure:
    """Values as captured and inside their scale blocks, what each format keeps of them, and what the capture holds."""
    quant_type = study.types[0]
    frame = study.of_type(quant_type)
    unread = f"; {len(study.problems)} problems, listed in tensor_stats.txt" if study.problems else ""
    of = "all types; above and at the right the" if len(study.types) > 1 else "the"
    findings = study.findings[:_MOST_FINDINGS]
    told = _FINDING_LINE * (len(findings) + 1) if findings else 0.0
    page = new_page(
        13.0,
        6.75 + told,
        title="What was captured, and what number formats make of it",
        note=f"{len(study.index)} tensors in {len(study.summary)} files, {numbers.size(study.summary['bytes'].sum())}, "
        f"of {of} {format_title(quant_type)} run{unread}",
        study=study,
        frame=frame,
    )
    families = {family: frame[frame["family"] == family] for family in FAMILIES if (frame["family"] == family).any()}
    top, bottom = _parts(page, findings, told)
    left, ruler, right = _top_axes(top)
    _draw_values(left, families)
    _draw_ranges(ruler)
    own = range_format(quant_type)
    if own.scale is None:
        shade_format(left, own)
    _draw_in_blocks(right, families, block_format(quant_type))
    *share_panels, kept = bottom.subplots(1, 4, width_ratios=[1, 1, 1, 1.45])
    for axes, (column, title) in zip(share_panels, _SHARES, strict=True):
        _draw_shares(axes, shares(study.index, study.summary, column), title)
    _draw_sqnr(kept, {family: rows[rows["operand"]] for family, rows in families.items() if rows["operand"].any()})
    return page


def _parts(page: Figure, findings: Sequence[Finding], told: float) -> tuple[Any, Any]:
    """The two rows of panels; between the head and them what stands out, where something does."""
    heights = [_TOP_ROW, _BOTTOM_ROW]
    if not findings:
        halves: Any = page.subfigures(2, 1, height_ratios=heights, hspace=0.04)
        return halves[0], halves[1]
    rows: Any = page.subfigures(3, 1, height_ratios=[told, *heights], hspace=0.02)
    words, top, bottom = rows
    left, line = 0.0, _FINDING_LINE / told
    words.text(left, 1 - line / 2, "What stands out", fontsize=8.5, fontweight="bold", color=INK, va="center")
    for place, finding in enumerate(findings, start=1):
        y, color = 1 - line * (place + 0.5), ALARM if finding.severity != "note" else MUTED
        words.text(left, y, finding.severity, fontsize=7.5, color=color, va="center")
        words.text(left + 0.045, y, finding.title, fontsize=7.5, color=INK, va="center")
    return top, bottom


def _top_axes(figure: SubFigure) -> tuple[Axes, Axes, Axes]:
    grid = figure.add_gridspec(2, 2, width_ratios=[1.35, 1.0], height_ratios=[3.2, 1.0], hspace=0.02)
    left = figure.add_subplot(grid[0, 0])
    return left, figure.add_subplot(grid[1, 0], sharex=left), figure.add_subplot(grid[:, 1])


def _draw_values(axes: Axes, families: Families) -> None:
    lowest, highest = 0.0, 8.0
    for family, rows in families.items():
        histogram, total = exponents_of(rows), int(rows["count"].sum())
        zeros = numbers.percent(100 * rows["zero"].sum() / max(1, total))
        label = f"{family}s: n = {numbers.count(total)}, zero {zeros}"
        draw_exponents(
            axes, histogram, total, color=FAMILY_COLORS[family], ls=FAMILY_LINES[family], lw=1.4, label=label
        )
        visible = np.flatnonzero(100 * histogram.counts >= _TAIL_PERCENT * total)
        if len(visible):
            lowest = min(lowest, histogram.first + float(visible[0]) - 1)
            highest = max(highest, histogram.first + len(histogram.counts) + 1.0)
    set_exponent_axis(axes, lowest, highest, count=14)
    _finish_histogram(axes, "Values as captured, by binade of |x|")
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, 0.95), frameon=True, edgecolor="none", framealpha=0.8)
    axes.tick_params(labelbottom=False)


def _finish_histogram(axes: Axes, title: str) -> None:
    set_log_axis(axes, _LEAST_PERCENT, _MOST_PERCENT)
    axes.set_ylabel("% of the elements in a binade")
    axes.set_title(title)


def _draw_ranges(axes: Axes) -> None:
    """One bar a format over the binades it can hold: as high as it has fraction bits there."""
    lower, upper = axes.get_xlim()
    for row, name in enumerate(_RULED_FORMATS):
        fmt = FORMATS[name]
        for band in precision_bands(fmt):
            start, end = max(band.lower, lower), min(band.upper, upper)
            if band.mantissa_bits is not None and end > start:
                height = _LEAST_BAR + (_MOST_BAR - _LEAST_BAR) * band.mantissa_bits / fmt.mantissa_bits
                axes.barh(row, end - start, height, left=start, color=format_color(name), lw=0)
    axes.set_yticks(range(len(_RULED_FORMATS)), [format_title(name).removeprefix("FP8 ") for name in _RULED_FORMATS])
    axes.set_ylim(-0.6, len(_RULED_FORMATS) - 0.4)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("range of each format without a scale; the height follows its fraction bits")


def _draw_in_blocks(axes: Axes, families: Families, fmt: Format) -> None:
    lowest = np.log2(fmt.min_subnormal) - 4
    for family, rows in families.items():
        depths, total = depths_of(rows), int(rows["count"].sum())
        if depths.sum():
            style: dict[str, Any] = {"color": FAMILY_COLORS[family], "ls": FAMILY_LINES[family], "lw": 1.4}
            draw_exponents(axes, scaled_into_blocks(depths, fmt), total, **style)
            visible = np.flatnonzero(100 * depths >= _TAIL_PERCENT * total)
            lowest = min(lowest, fmt.emax - min(int(visible[-1]), DEPTHS - 2))
    set_exponent_axis(axes, lowest, fmt.emax + 2.5, count=10)
    shade_format(axes, fmt)
    axes.set_xlabel(f"|x| divided by the scale of its block of {fmt.block} along the contraction axis")
    _finish_histogram(axes, f"The same values as the elements of {fmt.title} see them")


def _draw_shares(axes: Axes, table: pandas.DataFrame, title: str) -> None:
    table = table.head(_MOST_BARS)
    for row, (name, values) in enumerate(table.iterrows()):
        color = format_color(str(name))
        axes.barh(row + 0.22, values["percent"], 0.3, color=MUTED if color == INK else color, lw=0)
        text = f"{values['percent']:.3g} %   {int(values['rows'])} tensors   {numbers.size(values['bytes'])}"
        axes.text(1.5, row - 0.12, format_title(str(name)), va="center", fontsize=7.5, color=INK)
        axes.text(100, row - 0.12, text, ha="right", va="center", fontsize=7, color=MUTED)
    axes.set_yticks([])
    axes.set_ylim(max(len(table), _FEWEST_BARS) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("% of the elements")
    axes.set_title(f"Share {title}")


def _draw_sqnr(axes: Axes, operands: Families) -> None:
    """The median SQNR of the GEMM operands under each format, and the span that holds half of them."""
    formats = [name for name in SHOWN_FORMATS if any(name in tried_formats(rows) for rows in operands.values())]
    for place, (family, rows) in enumerate(operands.items()):
        color = FAMILY_COLORS[family]
        axes.plot([], [], color=color, lw=1.6, label=f"{family}s")
        for row, name in enumerate(reversed(formats)):
            values = rows[f"{name}.sqnr_db"].dropna().clip(0, _HIGHEST_SQNR)
            if values.empty:
                continue
            y = row + 0.24 * ((len(operands) - 1) / 2 - place)
            low, median, high = np.percentile(values, [25, 50, 75])
            axes.plot([low, high], [y, y], color=color, lw=1.6, alpha=0.6, solid_capstyle="butt")
            style: dict[str, Any] = {"mec": color, "mew": 0.8, "ms": 5.5, "clip_on": False}
            axes.plot(median, y, format_marker(name), color=format_color(name), **style)
    axes.set_yticks(range(len(formats)), [format_title(name) for name in reversed(formats)])
    axes.set_ylim(-0.6, max(1, len(formats)) - 0.4)
    axes.set_xlim(0, _HIGHEST_SQNR)
    axes.text(_HIGHEST_SQNR, -0.6, "and more ", ha="right", va="bottom", fontsize=6.5, color=MUTED)
    axes.set_xlabel("SQNR of the GEMM operands in dB, median and quartiles")
    axes.set_title("What each format keeps")
    if operands:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.08))
