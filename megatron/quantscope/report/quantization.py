"""quantization_analysis/: what each format would do to every GEMM operand, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.quantscope.analysis.aggregate import layer_matrix, merged
from megatron.quantscope.analysis.roles import site_order
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.report import numbers
from megatron.quantscope.report.axes import draw_format_table, set_layer_axis
from megatron.quantscope.report.page import format_legend, new_page
from megatron.quantscope.report.panels import Panels, add_placed_panels, color_bar
from megatron.quantscope.report.style import format_color, format_marker, tried_formats

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXIS_NOTE = (
    "Blocks run along the contraction axis; gradients of FP16 and HiF8 are scaled by pow2-amax, as in training."
)
_RELATIVE_ERROR = "relative_error_percent"
_LINEAR_SYMBOLS = ("x", "w", "dy")
_MOST_COLUMNS = 8
_HIGHEST_SQNR = 50.0  # dB: what keeps more is as good as exact here
_TICK_DB = 10.0
_NOTABLE_DROP = 3.0  # dB below the median that make a layer worth naming
_LINEAR_PERCENT = 1e-4  # of a symlog axis: below it is linear down to zero
_PERCENT_TICKS = (
    (0, "0"),
    (1e-4, ".0001"),
    (1e-3, ".001"),
    (1e-2, ".01"),
    (0.1, ".1"),
    (1, "1"),
    (10, "10"),
    (100, "100"),
)
_TABLE_FORMATS = (
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


def draw_sqnr_by_layer(study: Study, quant_type: str) -> Figure | None:
    """SQNR of every operand against the layer, one line a format."""
    title = "Which layers lose precision: SQNR of the GEMM operands by layer"
    note = (
        f"Signal to quantisation noise in dB, higher is better; cut off at {_HIGHEST_SQNR:g} dB. A cross at the "
        "bottom: finite values became Inf or NaN."
    )
    drawn = _draw_by_layer(study, quant_type, "sqnr_db", title, note)
    if drawn is None:
        return None
    page, panels = drawn
    low = _TICK_DB * np.floor(min(axes.get_ylim()[0] for axes in panels.of.values()) / _TICK_DB)
    panels.first.set_ylim(low, _HIGHEST_SQNR + 2)
    panels.first.set_yticks(np.arange(low, _HIGHEST_SQNR + 1, _TICK_DB))
    panels.label(x="layer", y="SQNR, dB")
    return page


def draw_relative_error_by_layer(study: Study, quant_type: str) -> Figure | None:
    """The root of the error's share of the signal's energy, against the layer."""
    title = "The relative error of the GEMM operands by layer"
    note = "The error's rms over the tensor's, in percent: what SQNR says in decibels."
    return _draw_percent(study, quant_type, _RELATIVE_ERROR, title, note, unit="relative error, %")


def draw_underflow_by_layer(study: Study, quant_type: str) -> Figure | None:
    """Underflow of every operand against the layer."""
    title = "Where small values are lost: underflow of the GEMM operands by layer"
    return _draw_percent(
        study, quant_type, "underflow_percent", title, "Percent of the non-zero elements that become 0."
    )


def draw_saturation_by_layer(study: Study, quant_type: str) -> Figure | None:
    """Saturation of every operand against the layer."""
    title = "Where large values are clipped: saturation of the GEMM operands by layer"
    note = "Percent of the finite elements beyond the format's largest value under their scale."
    return _draw_percent(study, quant_type, "saturated_percent", title, note)


def draw_format_overview(study: Study, quant_type: str) -> Figure | None:
    """SQNR of each site under each format: the median layer, and the worst where it stands out."""
    from matplotlib.colors import Normalize

    frame = _operands(study, quant_type)
    if frame.empty or not tried_formats(frame):
        return None
    groups = merged(frame, ["site", "layer_idx"])
    sites = sorted(groups.index.unique("site"), key=site_order)
    formats = tried_formats(groups, _TABLE_FORMATS)
    cells = [[groups.loc[site, f"{name}.sqnr_db"].dropna() for name in formats] for site in sites]
    medians = np.array([[layers.median() for layers in row] for row in cells], dtype=float)
    page = new_page(
        9.6,
        0.5 + 0.34 * len(sites),
        title="SQNR of each GEMM operand under each format",
        note=f"In dB: the median layer; below it the worst layer where it is {_NOTABLE_DROP:g} dB worse. {_AXIS_NOTE}",
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    axes = page.subplots()
    norm = Normalize(0, _HIGHEST_SQNR, clip=True)
    shown = np.clip(medians, 0, _HIGHEST_SQNR)
    image = draw_format_table(axes, sites, formats, shown, norm, lambda row, column: _cell(cells[row][column]))
    color_bar(page, image, axes, "SQNR in dB, median layer", shrink=0.7, extend="max")
    return page


def _operands(study: Study, quant_type: str) -> pandas.DataFrame:
    frame = study.of_type(quant_type)
    return frame[frame["operand"] & frame["layer_idx"].notna()]


def _cell(layers: pandas.Series) -> list[str]:
    """The median layer, and the worst one if it is notable."""
    if layers.empty:
        return ["-"]
    worst = layers.min()
    if not worst < min(layers.median(), _HIGHEST_SQNR) - _NOTABLE_DROP:
        return [numbers.decibels(layers.median())]
    return [numbers.decibels(layers.median()), f"{numbers.decibels(worst)} in layer {int(layers.idxmin())}"]


def _draw_percent(
    study: Study, quant_type: str, column: str, title: str, note: str, unit: str = "% of elements"
) -> Figure | None:
    drawn = _draw_by_layer(study, quant_type, column, title, note)
    if drawn is None:
        return None
    page, panels = drawn
    highest = max(axes.get_ylim()[1] for axes in panels.of.values())
    for axes in panels.of.values():
        axes.set_yscale("symlog", linthresh=_LINEAR_PERCENT, linscale=0.6)
        axes.set_yticks(*zip(*_PERCENT_TICKS, strict=True))
    panels.first.set_ylim(-_LINEAR_PERCENT / 3, 1.3 * min(100.0, max(highest, 1.0)))
    panels.label(x="layer", y=unit)
    return page


def _draw_by_layer(study: Study, quant_type: str, column: str, title: str, note: str) -> tuple[Figure, Panels] | None:
    frame = _operands(study, quant_type)
    if frame.empty or not tried_formats(frame):
        return None
    groups = _with_relative_errors(merged(frame, ["site", "layer_idx"]))
    cells = operand_cells(sorted(groups.index.unique("site"), key=site_order))
    page = new_page(
        2.1 + 2.15 * (1 + max(place for _, place in cells.values())),
        0.3 + 1.5 * (1 + max(row for row, _ in cells.values())),
        title=title,
        note=f"{note} {_AXIS_NOTE}",
        study=study,
        quant_type=quant_type,
        frame=frame,
        legend=format_legend(tried_formats(frame)),
    )
    panels = add_placed_panels(page, cells, sharex=True, sharey=True)
    for site, axes in panels.of.items():
        _draw_site(axes, groups.loc[[site]], column)
    return page, panels


def _with_relative_errors(groups: pandas.DataFrame) -> pandas.DataFrame:
    errors = {
        f"{name}.{_RELATIVE_ERROR}": 100 * np.sqrt(groups[f"{name}.error_squares"] / groups["sum_squares"])
        for name in tried_formats(groups)
    }
    return groups.assign(**errors)


def operand_cells(sites: list[str]) -> dict[str, tuple[int, int]]:
    """A place (row, column) for each site: linear modules are columns and x, w, dy rows; the others follow below."""
    linear = [site.rpartition(".") for site in sites if site.rpartition(".")[2] in _LINEAR_SYMBOLS]
    symbols = [symbol for symbol in _LINEAR_SYMBOLS if any(part[2] == symbol for part in linear)]
    modules = list(dict.fromkeys(module for module, _, _ in linear))
    cells = {}
    for module, _, symbol in linear:
        band, column = divmod(modules.index(module), _MOST_COLUMNS)
        cells[f"{module}.{symbol}"] = (band * len(symbols) + symbols.index(symbol), column)
    below = 1 + max((row for row, _ in cells.values()), default=-1)
    width = 1 + max((column for _, column in cells.values()), default=3)
    rest = [site for site in sites if site not in cells]
    return cells | {site: (below + place // width, place % width) for place, site in enumerate(rest)}


def _draw_site(axes: Axes, groups: pandas.DataFrame, column: str) -> None:
    layers: list[int] = []
    for name in tried_formats(groups):
        _, layers, (values,) = layer_matrix(groups, f"{name}.{column}")
        style: dict[str, Any] = {"color": format_color(name), "marker": format_marker(name), "ms": 2.4, "lw": 1.1}
        lost = np.isneginf(values)
        line = np.where(lost, np.nan, values)
        axes.plot(layers, np.minimum(line, _HIGHEST_SQNR) if column == "sqnr_db" else line, **style)
        foot = axes.get_xaxis_transform()
        axes.plot(np.array(layers)[lost], np.full(lost.sum(), 0.02), "x", color=style["color"], transform=foot)
    if layers:  # else no format was tried on this site
        set_layer_axis(axes, layers)
