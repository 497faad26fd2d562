"""layer_analysis/: every site of every layer as one image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron.quantscope.analysis.aggregate import Floats, layer_matrix, merged
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.analysis.trained_as import OWN, is_mixed, with_own
from megatron.quantscope.report import numbers
from megatron.quantscope.report.axes import draw_site_image
from megatron.quantscope.report.page import new_page
from megatron.quantscope.report.panels import add_panels, color_bar
from megatron.quantscope.report.style import SEQUENTIAL, format_title, shown_format, treatment_titles, tried_formats

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_FLOOR_PERCENT = 1e-5
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
    frame, name = study.of_type(quant_type), shown_format(quant_type).name
    if is_mixed(frame, name):
        return _draw_metric(study, quant_type, _own_underflow(frame), with_own(frame))
    if not tried_formats(frame, (name,)):
        return None
    metric = Metric(
        column=f"{name}.underflow_percent",
        title=f"Underflow of every tensor under {format_title(name)}",
        note="Percent of the non-zero elements that would become 0; results of GEMMs are shown beside their operands.",
        base=10,
        floor=_FLOOR_PERCENT,
    )
    return _draw_metric(study, quant_type, metric)


def _own_underflow(frame: pandas.DataFrame) -> Metric:
    return Metric(
        column=f"{OWN}.underflow_percent",
        title="Underflow of every operand under its own format",
        note=f"Percent of the non-zero elements that became 0; formats of this run: {treatment_titles(frame)}. Results "
        "of GEMMs, and operands that the run left as they were, are blank.",
        base=10,
        floor=_FLOOR_PERCENT,
    )


def _draw_metric(study: Study, quant_type: str, metric: Metric, frame: pandas.DataFrame | None = None) -> Figure | None:
    from matplotlib.colors import Normalize

    frame = study.of_type(quant_type) if frame is None else frame
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
    if not len(finite):
        return None
    limits = (finite.min(), finite.max())
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
