"""layer_analysis/massive_activations: the largest values along the depth, and the channels they sit in, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.quantscope.analysis.aggregate import largest_by_layer
from megatron.quantscope.analysis.findings.words import number
from megatron.quantscope.analysis.massive import LayerPeak, MassiveActivation, massive_activations
from megatron.quantscope.analysis.roles import ACTIVATION, site_order
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.report.axes import set_exponent_axis, set_layer_axis
from megatron.quantscope.report.page import new_page
from megatron.quantscope.report.panels import add_panels, note_right, rows_for
from megatron.quantscope.report.style import ALARM, FAMILY_COLORS, INK, MUTED

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS, _MOST_PANELS = 4, 8
_TOP_MARKS = (("o", 1.0), ("^", 0.6), ("v", 0.35))  # marker and opacity of the first, second and third largest
_PROBABILITIES = "p"  # at most 1 each: their largest says nothing
_ROOM = 3.0  # binades above the largest value, for what is written there
_ALIKE = 0.1  # of a value: what differs by less is written once
_LABEL_WIDTH = 0.13  # of the axis: labels of nearer peaks would overlap


def draw_massive_activations(study: Study, quant_type: str) -> Figure | None:
    """The three largest magnitudes and the median of each activation, against the layer; massive ones are named."""
    frame = study.of_type(quant_type)
    frame = frame[(frame["family"] == ACTIVATION) & (frame["symbol"] != _PROBABILITIES) & frame["layer_idx"].notna()]
    frame = frame[frame["median_magnitude"] > 0]
    if frame.empty:
        return None
    prominence = (frame["amax"] / frame["median_magnitude"]).groupby(frame["site"]).max().sort_values(ascending=False)
    along = frame.groupby("site")["layer_idx"].nunique() > 1  # the stream's output is of one layer
    prominence = prominence[along[prominence.index]] if along.any() else prominence
    sites = sorted(prominence.head(_MOST_PANELS).index, key=site_order)
    page = new_page(
        1.0 + 2.7 * min(_COLUMNS, len(sites)),
        0.3 + 1.9 * rows_for(len(sites), _COLUMNS),
        title="Massive activations along the depth",
        note="The three largest |x| of a tensor and the median, of the sites where they are farthest apart. Red: a "
        "massive activation, above 100 and a thousand times the median, with its channel; a minus sign where it is "
        "negative, which in a layer's output takes out again what earlier layers wrote.",
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    panels = add_panels(page, sites, _COLUMNS, sharex=True, sharey=True)
    massive = massive_activations(frame)
    for site, axes in panels.of.items():
        _draw_tops(axes, frame[frame["site"] == site])
    set_layer_axis(panels.first, sorted({int(layer) for layer in frame["layer_idx"]}))
    lower, upper = panels.first.get_ylim()
    set_exponent_axis(panels.first, lower, upper + _ROOM, axis="y")
    for site, axes in panels.of.items():
        _name_massive(axes, [one for one in massive if one.site == site])
    _add_legend(panels.of, {one.site for one in massive})
    panels.label(x="layer", y="|x|")
    return page


def _draw_tops(axes: Axes, frame: pandas.DataFrame) -> None:
    layers, tops = largest_by_layer(frame)
    median = frame.groupby("layer_idx")["median_magnitude"].median().reindex(layers)
    for place, (marker, alpha) in enumerate(_TOP_MARKS):
        style: dict[str, Any] = {"marker": marker, "ms": 2.6, "lw": 1.1, "alpha": alpha}
        axes.plot(layers, np.log2(tops[:, place]), color=FAMILY_COLORS[ACTIVATION], label=f"top {place + 1}", **style)
    axes.plot(layers, np.log2(median), color=MUTED, ls="--", lw=1.1, label="median")


def _name_massive(axes: Axes, found: list[MassiveActivation]) -> None:
    """Mark every layer of a site's massive activations; write the channel, and the highest values of its largest."""
    if not found:
        return
    channels = list(dict.fromkeys(one.channel for one in found))
    note_right(axes, f"channel {', '.join(map(str, channels[:3]))}{' ...' if len(channels) > 3 else ''}", ALARM)
    for one in found:
        x = [peak.layer for peak in one.peaks]
        y = [np.log2(abs(peak.value)) for peak in one.peaks]
        axes.plot(x, y, "o", color=ALARM, ms=3.6, zorder=4)
    lower, upper = axes.get_xlim()
    for peak in _labelled([peak for one in found for peak in one.peaks], _LABEL_WIDTH * (upper - lower)):
        at = (peak.layer, np.log2(abs(peak.value)))
        offset: dict[str, Any] = {"xytext": (0, 4), "textcoords": "offset points", "ha": _alignment(axes, peak.layer)}
        axes.annotate(number(peak.value), at, fontsize=6.5, color=ALARM, annotation_clip=False, **offset)


def _labelled(peaks: list[LayerPeak], width: float) -> list[LayerPeak]:
    """The largest of neighbouring peaks, and the first of those that are alike."""
    kept: list[LayerPeak] = []
    for peak in sorted(peaks, key=lambda peak: (-abs(peak.value), peak.layer)):
        near = any(abs(peak.layer - other.layer) < width for other in kept)
        alike = any(abs(peak.value / other.value - 1) < _ALIKE for other in kept)
        if not near and not alike:
            kept.append(peak)
    return kept


def _alignment(axes: Axes, layer: int) -> str:
    lower, upper = axes.get_xlim()
    place = (layer - lower) / (upper - lower)
    return "left" if place < 0.2 else "right" if place > 0.8 else "center"


def _add_legend(panels: dict[str, Axes], massive: set[str]) -> None:
    """In a panel where nothing is written, if there is one."""
    axes = next((axes for site, axes in panels.items() if site not in massive), next(iter(panels.values())))
    axes.legend(ncols=2, loc="upper left", fontsize=6.5, columnspacing=0.8, handlelength=1.5, labelcolor=INK)
