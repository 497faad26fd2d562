"""statistics/: block scales, and the numbers of every site in one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.quantscope.analysis.aggregate import merged
from megatron.quantscope.analysis.roles import site_order
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.analysis.trained_as import OWN, is_mixed, with_own
from megatron.quantscope.report import numbers
from megatron.quantscope.report.page import new_page
from megatron.quantscope.report.style import (
    ALARM,
    FAINT,
    INK,
    MISSING,
    format_title,
    shown_format,
    treatment_titles,
    tried_formats,
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


def draw_table(study: Study, quant_type: str) -> Figure | None:
    """The numbers of every site, all layers together."""
    frame, name = study.of_type(quant_type), shown_format(quant_type).name
    under = format_title(name)
    if is_mixed(frame, name):
        frame, name, under = with_own(frame), OWN, f"each operand's own format ({treatment_titles(frame)})"
    groups = merged(frame, "site")
    sites = sorted(groups.index, key=site_order)
    page = new_page(
        11.0,
        0.2 + _ROW * (len(sites) + 1),
        title="Every site in numbers",
        note="All layers, micro-batches and ranks together; SQNR in dB, underflow and saturation under "
        f"{under}; kurtosis is the worst tensor's.",
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    axes = page.subplots()
    columns = _columns(name, bool(tried_formats(groups, (name,))))
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


def _columns(name: str, tried: bool) -> dict[str, Callable[[pandas.Series], str]]:
    """Title -> text of a row of merged statistics; errors are those of the treatment `name`, if it was tried."""
    errors: dict[str, Callable[[pandas.Series], str]] = {
        "SQNR": lambda row: numbers.decibels(row[f"{name}.sqnr_db"]),
        "underflow": lambda row: numbers.percent(row[f"{name}.underflow_percent"]),
        "saturated": lambda row: numbers.percent(row[f"{name}.saturated_percent"]),
    }
    return {
        "tensors": lambda row: str(int(row["rows"])),
        "elements": lambda row: numbers.count(row["count"]),
        "zero": lambda row: numbers.percent(row["zero_percent"]),
        _NONFINITE: lambda row: numbers.count(row["nonfinite"]),
        "amax": lambda row: numbers.magnitude(row["amax"]),
        "rms": lambda row: numbers.magnitude(row["rms"]),
        "mean": lambda row: numbers.magnitude(row["mean"]),
        "kurtosis": lambda row: numbers.magnitude(row["kurtosis"]),
    } | (errors if tried else {})


def _write_row(axes: Axes, line: int, site: str, texts: dict[str, str], alarm: bool) -> None:
    style: dict[str, Any] = {"va": "center", "fontsize": 7.2, "fontfamily": "DejaVu Sans Mono"}
    axes.text(0.05, line, site, color=INK, **style)
    for place, (title, text) in enumerate(texts.items(), start=1):
        color = ALARM if alarm and title == _NONFINITE else INK
        axes.text(place + 0.95, line, text, ha="right", color=color, **style)
