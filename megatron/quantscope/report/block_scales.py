"""statistics/: the E8M0 scales of blocks, along the axes of both GEMMs and under both scale rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.quantscope.analysis.exponents import ExponentHistogram
from megatron.quantscope.analysis.roles import SYMBOL_ORDER
from megatron.quantscope.analysis.scales import scale_exponents
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.analysis.tables import BLOCK_PREFIXES
from megatron.quantscope.formats import FORMATS, Format
from megatron.quantscope.formats.catalog import MX_BLOCK
from megatron.quantscope.report import numbers
from megatron.quantscope.report.axes import draw_exponents, set_exponent_axis, set_log_axis
from megatron.quantscope.report.page import new_page
from megatron.quantscope.report.panels import add_panels, note_right, rows_for
from megatron.quantscope.report.style import ALARM, FAMILY_COLORS, INK, MUTED, block_format

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 4
_LEAST_PERCENT = 1e-3
_MOST_BLOCKS = 0.99  # the share whose width in binades is written into a panel
_FLOOR, _RCEIL = "floor", "rceil"
_SECOND_DASHES, _RCEIL_DASHES = (0, (4, 1.5)), (0, (1, 1))


@dataclass(frozen=True)
class _Scales:
    """The scales of one kind of operand: by the floor rule in its first and second GEMM, by rceil in the first."""

    first: ExponentHistogram
    second: ExponentHistogram
    rceil: ExponentHistogram


def draw_block_scales(study: Study, quant_type: str) -> Figure | None:
    """Histogram of the E8M0 scales of each kind of operand."""
    frame = study.of_type(quant_type).query("operand")
    fmt = block_format(quant_type)
    found = {symbol: _scales(frame[frame["symbol"] == symbol], fmt) for symbol in SYMBOL_ORDER}
    found = {symbol: scales for symbol, scales in found.items() if scales.first.total}
    if not found:
        return None
    page = new_page(
        11.0,
        0.3 + 1.75 * rows_for(len(found), _COLUMNS),
        title=f"Block scales of the GEMM operands under {fmt.title}",
        note=f"Percent of the blocks of {MX_BLOCK} by their E8M0 scale $2^k$; blocks of zeros have none here. A wide "
        f"histogram needs a scale a block, a narrow one would do with one a tensor. {_others(fmt)}",
        study=study,
        quant_type=quant_type,
        frame=frame,
        legend=_legend(),
    )
    panels = add_panels(page, list(found), _COLUMNS, sharex=True, sharey=True)
    for symbol, axes in panels.of.items():
        _draw(axes, found[symbol], frame[frame["symbol"] == symbol])
    histograms = [histogram for scales in found.values() for histogram in (scales.first, scales.second, scales.rceil)]
    present = [histogram for histogram in histograms if histogram.total]
    lower = min(histogram.first for histogram in present) - 1
    upper = max(histogram.first + len(histogram.counts) for histogram in present) + 1
    set_exponent_axis(panels.first, lower, upper, count=7)
    set_log_axis(panels.first, _LEAST_PERCENT, 100)
    panels.label(x="scale", y="% of blocks")
    return page


def _scales(rows: pandas.DataFrame, fmt: Format) -> _Scales:
    once, twice = (rows[rows[f"{prefix}_exponent_first"].notna()] for prefix in BLOCK_PREFIXES)
    return _Scales(
        scale_exponents(once, fmt.name, _FLOOR),
        scale_exponents(twice, fmt.name, _FLOOR, 1),
        scale_exponents(once, fmt.name, _RCEIL),
    )


def _others(fmt: Format) -> str:
    """How the scales of the other MX formats follow from these."""
    shifts: dict[int, list[str]] = {}
    for other in FORMATS.values():
        if other.scale == "e8m0" and other.name != fmt.name:
            shifts.setdefault(fmt.emax - other.emax, []).append(other.title)
    parts = [f"{', '.join(titles)}: k {'+' if shift >= 0 else '-'} {abs(shift)}" for shift, titles in shifts.items()]
    return f"Under the floor rule other formats have the same ones, shifted: {'; '.join(parts)}."


def _draw(axes: Axes, scales: _Scales, rows: pandas.DataFrame) -> None:
    color = FAMILY_COLORS[rows["family"].iloc[0]]
    draw_exponents(axes, scales.first, scales.first.total, color=color, fill=True, alpha=0.4)
    draw_exponents(axes, scales.first, scales.first.total, color=color, lw=1.1)
    if scales.rceil.total:
        draw_exponents(axes, scales.rceil, scales.rceil.total, color=MUTED, lw=1.0, ls=_RCEIL_DASHES)
    if scales.second.total:
        draw_exponents(axes, scales.second, scales.second.total, color=ALARM, lw=1.1, ls=_SECOND_DASHES)
    widths = [str(one.width_of(_MOST_BLOCKS)) for one in (scales.first, scales.second) if one.total]
    note_right(axes, f"{numbers.count(scales.first.total)} blocks, 99 % in {' | '.join(widths)} binades", MUTED)


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color=INK, label="first GEMM, floor"),
        Line2D([], [], color=ALARM, ls=_SECOND_DASHES, label="second GEMM, floor: blocks along the other axis"),
        Line2D([], [], color=MUTED, ls=_RCEIL_DASHES, label="first GEMM, rceil"),
    ]
