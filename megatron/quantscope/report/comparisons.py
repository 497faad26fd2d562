"""comparisons/: formats against each other on the tensors of one run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.quantscope.analysis.roles import FAMILIES
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.report.page import new_page
from megatron.quantscope.report.panels import add_panels
from megatron.quantscope.report.style import (
    INK,
    MUTED,
    SHOWN_FORMATS,
    format_color,
    format_marker,
    format_title,
    tried_formats,
)

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HIGHEST_SQNR = 60.0
_JITTER = 0.09  # of a column's width: where a dot lies within it means nothing
_MEDIAN_WIDTH = 0.32
_CREST_FORMATS = SHOWN_FORMATS[1:]  # fp16 is nearly exact for a bf16 run


def draw_formats(study: Study, quant_type: str) -> Figure | None:
    """Every operand tensor as a dot under each format."""
    frame = study.of_type(quant_type).query("operand")
    families = [family for family in FAMILIES if (frame["family"] == family).any()]
    if not families or not tried_formats(frame):
        return None
    titles = {f"{family}s: {(frame['family'] == family).sum()} tensors": family for family in families}
    page = new_page(
        11.0,
        3.5,
        title="Formats compared on the same tensors",
        note=f"SQNR of every GEMM operand, a dot a tensor, cut off at {_HIGHEST_SQNR:g} dB; the bar and the number "
        "below are the median. Gradients of FP16 and HiF8 after pow2-amax. Dots at the foot: values were lost to Inf.",
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    panels = add_panels(page, list(titles), len(titles), sharey=True)
    for title, family in titles.items():
        _draw_columns(panels.of[title], frame[frame["family"] == family])
    panels.first.set_ylim(0, _HIGHEST_SQNR + 3)
    panels.label(y="SQNR, dB")
    return page


def draw_crest_factors(study: Study, quant_type: str) -> Figure | None:
    """How rough a tensor is against what formats keep of it."""
    frame = study.of_type(quant_type).query("operand")
    frame = frame[frame["rms"] > 0]
    if frame.empty or not tried_formats(frame, _CREST_FORMATS):
        return None
    page = new_page(
        10.0,
        3.0,
        title="Outliers and what a format keeps of them",
        note="Crest factor amax / rms of every GEMM operand against its SQNR; the worst is named. SQNR weighs by "
        "energy: where one massive activation holds nearly all of it, SQNR says how well that one value is kept, and "
        "underflow what becomes of the others.",
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    titles = {format_title(name): name for name in tried_formats(frame, _CREST_FORMATS)}
    panels = add_panels(page, list(titles), len(titles), sharex=True, sharey=True)
    for title, name in titles.items():
        _draw_crest(panels.of[title], frame, name)
    panels.first.margins(x=0.12, y=0.1)
    panels.label(x="log2(amax / rms)", y="SQNR, dB")
    return page


def _draw_columns(axes: Axes, frame: pandas.DataFrame) -> None:
    spread = np.random.default_rng(0)
    formats = tried_formats(frame)
    for place, name in enumerate(formats):
        values = frame[f"{name}.sqnr_db"].dropna().clip(0, _HIGHEST_SQNR).to_numpy()
        if not len(values):
            continue
        x = place + _JITTER * spread.standard_normal(len(values))
        axes.plot(x, values, format_marker(name), color=format_color(name), ms=2.4, alpha=0.45, mew=0)
        median = float(np.median(values))
        axes.plot([place - _MEDIAN_WIDTH, place + _MEDIAN_WIDTH], [median, median], color=INK, lw=1.6)
        text = f"{median:.1f}" if median < _HIGHEST_SQNR else f"> {_HIGHEST_SQNR:g}"
        foot = axes.get_xaxis_transform()
        axes.text(place, 0.02, text, ha="center", va="bottom", fontsize=7.5, color=INK, transform=foot)
    axes.set_xticks(range(len(formats)), [format_title(name).replace(" ", "\n") for name in formats])
    axes.set_xlim(-0.6, max(1, len(formats)) - 0.4)
    axes.grid(visible=False, axis="x")


def _draw_crest(axes: Axes, frame: pandas.DataFrame, name: str) -> None:
    crest = np.log2(frame["amax"] / frame["rms"])
    values = frame[f"{name}.sqnr_db"].replace([np.inf, -np.inf], np.nan)
    axes.plot(crest, values, format_marker(name), color=format_color(name), ms=2.6, alpha=0.5, mew=0)
    if values.notna().any():
        worst = values.idxmin()
        layer = frame.loc[worst, "layer_idx"]
        text = f"{frame.loc[worst, 'site']} L{int(layer)}" if layer == layer else str(frame.loc[worst, "site"])
        offset: dict[str, Any] = {"xytext": (0, -8), "textcoords": "offset points"}
        axes.annotate(text, (crest[worst], values[worst]), ha="center", fontsize=6.5, color=MUTED, **offset)
