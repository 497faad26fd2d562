"""layer_analysis/: every site of every layer as one image, and massive activations along the depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.quantscope.analysis.aggregate import Floats, largest_by_layer, layer_matrix, merged
from megatron.quantscope.analysis.roles import ACTIVATION, site_order
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.report import numbers
from megatron.quantscope.report.axes import draw_site_image, set_exponent_axis, set_layer_axis
from megatron.quantscope.report.page import new_page
from megatron.quantscope.report.panels import add_panels, color_bar, rows_for
from megatron.quantscope.report.style import FAMILY_COLORS, MUTED, SEQUENTIAL, format_title, shown_format

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS, _MOST_PANELS = 4, 8
_FLOOR_PERCENT = 1e-5
_TOP_MARKS = (("o", 1.0), ("^", 0.6), ("v", 0.35))  # marker and opacity of the first, second and third largest
_BAR_TICKS = 8


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that an image shows by the logarithm of it.

    Attributes:
        column: Of `aggregate.merged`.
        title: What it is, in words.
        note: How it is defined.
        base: Of the logarithm: 2 for magnitudes, 10 for others.
        floor: What is less is shown as this, and written as 0; 0: no floor.
    """

    column: str
    title: str
    note: str
    base: int = 2
    floor: float = 0.0

    def logarithm(self, values: Floats) -> Floats:
        """What the colours show: NaN and -Inf where there is no value."""
        with np.errstate(divide="ignore", invalid="ignore"):
            result: Floats = np.log2(np.maximum(values, self.floor)) / np.log2(self.base)
        return result

    def tick_label(self, tick: float) -> str:
        """The number that a place on the colour bar stands for."""
        value = float(self.base**tick)
        if value <= 1.01 * self.floor:
            return "0"
        return numbers.power_of_two(tick) if self.base == 2 else numbers.magnitude(value)


_AMAX = Metric(column="amax", title="Largest magnitude of every tensor", note="Largest |x| of the finite elements.")
_RMS = Metric(column="rms", title="Root mean square of every tensor", note="rms of the finite elements.")
_KURTOSIS = Metric(
    column="kurtosis",
    title="Kurtosis of every tensor",
    note="E[x^4] / E[x^2]^2 of the worst tensor of a cell: 3 for a Gaussian, large with outliers.",
    base=10,
)


def draw_amax(study: Study, quant_type: str) -> Figure | None:
    """Image of the largest magnitude."""
    return _draw_metric(study, quant_type, _AMAX)


def draw_rms(study: Study, quant_type: str) -> Figure | None:
    """Image of the root mean square."""
    return _draw_metric(study, quant_type, _RMS)


def draw_kurtosis(study: Study, quant_type: str) -> Figure | None:
    """Image of the kurtosis."""
    return _draw_metric(study, quant_type, _KURTOSIS)


def draw_underflow(study: Study, quant_type: str) -> Figure | None:
    """Image of the underflow under the run's own format, or MXFP8 where the run has none of its own."""
    name = shown_format(quant_type).name
    metric = Metric(
        column=f"{name}.underflow_percent",
        title=f"Underflow of every tensor under {format_title(name)}",
        note="Percent of the non-zero elements that would become 0; results of GEMMs are shown beside their operands.",
        base=10,
        floor=_FLOOR_PERCENT,
    )
    return _draw_metric(study, quant_type, metric)


def draw_massive_activations(study: Study, quant_type: str) -> Figure | None:
    """The three largest magnitudes and the median of each activation, against the layer."""
    frame = study.of_type(quant_type)
    frame = frame[(frame["family"] == ACTIVATION) & frame["layer_idx"].notna() & (frame["median_magnitude"] > 0)]
    if frame.empty:
        return None
    prominence = (frame["amax"] / frame["median_magnitude"]).groupby(frame["site"]).max().sort_values(ascending=False)
    sites = sorted(prominence.head(_MOST_PANELS).index, key=site_order)
    page = new_page(
        1.0 + 2.7 * min(_COLUMNS, len(sites)),
        0.3 + 1.9 * rows_for(len(sites), _COLUMNS),
        title="Massive activations along the depth",
        note="The three largest |x| of a tensor and the median, of the sites where they are farthest apart. A top far "
        "above the median in few layers is a massive activation: it sets the scale of its block, or of its tensor.",
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    panels = add_panels(page, sites, _COLUMNS, sharex=True, sharey=True)
    for site, axes in panels.of.items():
        _draw_tops(axes, frame[frame["site"] == site])
    lower, upper = panels.first.get_ylim()
    set_exponent_axis(panels.first, lower, upper + 1, axis="y")
    panels.first.legend(ncols=2, loc="upper left", fontsize=6.5, columnspacing=0.8, handlelength=1.5)
    panels.label(x="layer", y="|x|")
    return page


def _draw_tops(axes: Axes, frame: pandas.DataFrame) -> None:
    layers, tops = largest_by_layer(frame)
    median = frame.groupby("layer_idx")["median_magnitude"].median().reindex(layers)
    for place, (marker, alpha) in enumerate(_TOP_MARKS):
        style: dict[str, Any] = {"marker": marker, "ms": 2.6, "lw": 1.1, "alpha": alpha}
        axes.plot(layers, np.log2(tops[:, place]), color=FAMILY_COLORS[ACTIVATION], label=f"top {place + 1}", **style)
    axes.plot(layers, np.log2(median), color=MUTED, ls="--", lw=1.1, label="median")
    set_layer_axis(axes, layers)


def _draw_metric(study: Study, quant_type: str, metric: Metric) -> Figure | None:
    from matplotlib.colors import Normalize

    frame = study.of_type(quant_type)
    frame = frame[frame["layer_idx"].notna()]
    if frame.empty:
        return None
    backward = frame["operation"] == "backward"
    halves = {name: rows for name, rows in (("forward", frame[~backward]), ("backward", frame[backward])) if len(rows)}
    images = {}
    for name, rows in halves.items():
        sites, layers, values = layer_matrix(merged(rows, ["site", "layer_idx"]), metric.column)
        images[name] = (sites, layers, metric.logarithm(values))
    finite = np.concatenate([values[np.isfinite(values)] for *_, values in images.values()])
    limits = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    page = new_page(
        2.0 + 4.6 * len(images),
        0.45 + 0.21 * max(len(sites) for sites, *_ in images.values()),
        title=metric.title,
        note=f"{metric.note} A row is a site, a column a layer.",
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    panels = add_panels(page, list(images), len(images))
    for name, (sites, layers, values) in images.items():
        drawn = draw_site_image(panels.of[name], sites, layers, values, Normalize(*limits), SEQUENTIAL)
    bar = color_bar(page, drawn, list(panels.of.values()), "", aspect=35)
    ticks = np.arange(np.ceil(limits[0]), limits[1] + 1e-9, max(1, round((limits[1] - limits[0]) / _BAR_TICKS)))
    bar.set_ticks(ticks, labels=[metric.tick_label(tick) for tick in ticks])
    return page
