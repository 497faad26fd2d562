"""quantization_analysis/: two ways of quantising the same operands with one format, layer by layer.

scale_rules   the floor rule for E8M0 scales (OCP) against rceil, which never clips
second_gemm   blocks along the axis of an operand's first GEMM against those of its second
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.quantscope.analysis.aggregate import layer_matrix, merged, treatments_of
from megatron.quantscope.analysis.roles import site_order
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.report.axes import set_layer_axis
from megatron.quantscope.report.page import new_page
from megatron.quantscope.report.panels import add_placed_panels, note_right
from megatron.quantscope.report.quantization import operand_cells
from megatron.quantscope.report.style import INK, MUTED, format_color, format_marker, format_title

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = ("mxfp8", "mxfp4")
_HIGHEST_SQNR = 60.0
_SECOND, _RCEIL = "@2", "_rceil"  # of the names of treatments
_ARROW = "\N{RIGHTWARDS ARROW}"


def draw_scale_rules(study: Study, quant_type: str) -> Figure | None:
    """SQNR under both scale rules, and how much each clips."""
    return _draw_pairs(
        study,
        quant_type,
        _RCEIL,
        ("floor", "rceil"),
        title="Scale rules compared: floor against rceil",
        note="SQNR of every GEMM operand, solid with the floor rule of OCP, dashed with rceil, which rounds scales up "
        "so that nothing is clipped. At the right what each rule clips, in percent of the elements.",
    )


def draw_second_gemm(study: Study, quant_type: str) -> Figure | None:
    """SQNR along the axes of both GEMMs of an operand."""
    return _draw_pairs(
        study,
        quant_type,
        _SECOND,
        ("first GEMM", "second GEMM"),
        title="The same operand in both of its GEMMs",
        note="SQNR with blocks along the axis that each GEMM sums over: solid the first, dashed "
        "the second. Where an outlier channel shares the blocks of its neighbours, one axis loses more than the other.",
    )


def _draw_pairs(
    study: Study, quant_type: str, suffix: str, names: tuple[str, str], *, title: str, note: str
) -> Figure | None:
    frame = study.of_type(quant_type)
    frame = frame[frame["operand"] & frame["layer_idx"].notna()]
    tried = set(treatments_of(frame))
    formats = [name for name in _FORMATS if {name, f"{name}{suffix}"} <= tried]
    if frame.empty or not formats or frame[f"{formats[0]}{suffix}.sqnr_db"].isna().all():
        return None
    groups = merged(frame, ["site", "layer_idx"])
    cells = operand_cells(sorted(groups.index.unique("site"), key=site_order))
    page = new_page(
        2.1 + 2.15 * (1 + max(place for _, place in cells.values())),
        0.3 + 1.5 * (1 + max(row for row, _ in cells.values())),
        title=title,
        note=note,
        study=study,
        quant_type=quant_type,
        frame=frame,
        legend=_legend(formats, names),
    )
    panels = add_placed_panels(page, cells, sharex=True, sharey=True)
    for site, axes in panels.of.items():
        for name in formats:
            _draw_lines(axes, groups.loc[[site]], name, suffix)
        note_right(axes, _fact(frame[frame["site"] == site], groups.loc[[site]], formats, suffix), MUTED)
    set_layer_axis(panels.first, sorted({int(layer) for layer in frame["layer_idx"]}))
    panels.label(x="layer", y="SQNR, dB")
    return page


def _draw_lines(axes: Axes, groups: pandas.DataFrame, name: str, suffix: str) -> None:
    for treatment, dashes, marker in ((name, "-", format_marker(name)), (f"{name}{suffix}", (0, (3, 1.5)), "")):
        _, layers, (values,) = layer_matrix(groups, f"{treatment}.sqnr_db")
        shown = np.where(np.isneginf(values), np.nan, np.minimum(values, _HIGHEST_SQNR))
        axes.plot(layers, shown, color=format_color(name), ls=dashes, marker=marker, ms=2.2, lw=1.1)


def _fact(rows: pandas.DataFrame, groups: pandas.DataFrame, formats: list[str], suffix: str) -> str:
    """What the right of a panel's title says: the GEMMs, or the clipped share under both rules."""
    if suffix == _SECOND:
        gemms = rows["gemms"].iloc[0] if "gemms" in rows else []
        return f" {_ARROW} ".join(gemms) if gemms is not None else ""
    finite = (groups["count"] - groups["nan"] - groups["inf"]).sum()
    sides = []
    for rule in ("", suffix):
        clipped = [100 * groups[f"{name}{rule}.saturated"].sum() / max(1, finite) for name in formats]
        sides.append(" / ".join(f"{share:.2g}" for share in clipped))
    return f"clipped: {f' {_ARROW} '.join(sides)} %"


def _legend(formats: list[str], names: tuple[str, str]) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=format_color(name), marker=format_marker(name), label=format_title(name))
        for name in formats
    ]
    first, second = names
    handles.append(Line2D([], [], color=INK, label=first))
    handles.append(Line2D([], [], color=INK, ls=(0, (3, 1.5)), label=second))
    return handles
