"""comparisons/: runs side by side: their losses, and how far from the baseline they are along the depth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.quantscope.analysis.comparison.growth import first_iteration, flowing, growths
from megatron.quantscope.analysis.comparison.parting import BEGINS_TO_PART_DB, PARTED_DB
from megatron.quantscope.analysis.losses import loss_differences, losses_by_type
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.capture.metadata import BACKWARD, FORWARD
from megatron.quantscope.report.axes import label_end, set_layer_axis
from megatron.quantscope.report.page import new_page
from megatron.quantscope.report.panels import add_panels
from megatron.quantscope.report.run_style import RunStyle, run_legend, run_styles, run_title
from megatron.quantscope.report.style import FAINT, MUTED

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series = dict[str, dict[int, float]]

HIGHEST_SQNR, LOWEST_SQNR = 60.0, -20.0
_BAND = (0.1, 0.9)  # quantiles over the tensors of a layer
_LEGEND_CHARACTERS, _HANDLE = 13.0, 7  # of a legend on one line: an inch, and what a handle takes
_PASSES = {FORWARD: "forward, first layer to last", BACKWARD: "backward, last layer to first"}
_MARKS = {BEGINS_TO_PART_DB: "error 1 %", PARTED_DB: "10 %", 0.0: "100 %"}  # of the signal


def draw_losses(study: Study) -> Figure | None:
    """The loss of every run against the iteration, and its difference to the baseline's."""
    losses = losses_by_type(study.commits, _labels(study))
    iterations = {iteration for by_iteration in losses.values() for iteration in by_iteration}
    if len(losses) * len(iterations) < 2:
        return None
    baseline, styles = next(iter(losses)), run_styles(list(losses))
    one_iteration = len(iterations) == 1
    panels_shown = ["lm loss", f"difference to {run_title(baseline)}, %"][: len(losses)]
    page = new_page(
        9.5,
        0.9 + 0.3 * len(losses) if one_iteration else 3.0,
        title="Loss of the captured iterations by quant type",
        note="lm loss as the commit records hold it, and its difference in percent where both have the iteration; "
        "below about 0.5 % it can be the order of summation.",
        study=study,
        legend=() if one_iteration else run_legend(styles),
    )
    panels = add_panels(page, panels_shown, 2, sharey=one_iteration)
    series = (losses, loss_differences(losses, baseline))
    for axes, values, text in zip(panels.of.values(), series, ("{:.3f}", "{:+.2f} %"), strict=False):
        if one_iteration:
            _draw_bars(axes, values, styles, text)
        else:
            _draw_lines(axes, values, styles)
    return page


def draw_divergence(study: Study) -> Figure | None:
    """SQNR of every run against the baseline along the execution: forward through the layers, then backward."""
    table = study.comparison
    if table is None or table.empty:
        return None
    table = first_iteration(table)
    rows = {name: flowing(table, name) for name in _PASSES}
    passes = [name for name in _PASSES if len(rows[name])]
    if not passes:
        return None
    baseline = run_title(str(table["baseline"].iloc[0]))
    styles = run_styles(list(table["run"].unique()))
    width, legend = 1.4 + 4.5 * len(passes), run_legend(styles)
    on_top = sum(len(style.title) + _HANDLE for style in styles.values()) <= width * _LEGEND_CHARACTERS
    page = new_page(
        width,
        3.6,
        title=f"How far runs part from the {baseline} run along the depth",
        note=f"SQNR with the {baseline} run's tensor as the signal: everything that was different up to there. Lines: "
        "median of a layer's tensors but its weights, first iteration; shaded: 10 to 90 % of them. Equal tensors lie "
        f"at {HIGHEST_SQNR:g} dB or above, tensors that lost values to Inf or NaN at {LOWEST_SQNR:g} dB or below.",
        study=study,
        legend=legend if on_top else (),
    )
    panels = add_panels(page, [_PASSES[name] for name in passes], len(passes), sharey=True)
    for name in passes:
        _draw_pass(panels.of[_PASSES[name]], rows[name], styles)
    if BACKWARD in passes:
        panels.of[_PASSES[BACKWARD]].invert_xaxis()
    _mark_levels(list(panels.of.values()))
    if not on_top:
        panels.first.legend(handles=legend, fontsize=6, ncols=2, loc="upper right", frameon=True, framealpha=0.9)
    panels.label(x="layer", y="SQNR, dB")
    return page


def _draw_pass(axes: Axes, rows: pandas.DataFrame, styles: dict[str, RunStyle]) -> None:
    medians = {(growth.run, growth.operation): growth for growth in growths(rows)}
    for (label, _), growth in medians.items():
        of_run = rows[rows["run"] == label]
        levels = _clipped(of_run["sqnr_db"]).groupby(of_run["layer_idx"])
        lower, upper = (levels.quantile(level) for level in _BAND)
        style = styles[label]
        axes.fill_between(lower.index.to_numpy(float), lower, upper, color=style.color, alpha=0.15, lw=0)
        values = np.clip(growth.sqnr_db, LOWEST_SQNR, HIGHEST_SQNR)
        axes.plot(growth.layers, values, ms=3.2, lw=1.4, **style.options)
    set_layer_axis(axes, sorted(int(layer) for layer in rows["layer_idx"].unique()))


def _mark_levels(panels: list[Axes]) -> None:
    """Lines where the error is so many percent of the signal, named at the right."""
    lower, upper = panels[0].get_ylim()
    panels[0].set_ylim(max(lower, LOWEST_SQNR - 2), min(max(upper, BEGINS_TO_PART_DB + 2), HIGHEST_SQNR + 2))
    lower, upper = panels[0].get_ylim()
    for level, text in _MARKS.items():
        if lower < level < upper:
            for axes in panels:
                axes.axhline(level, color=FAINT, lw=0.9, ls=(0, (4, 3)), zorder=0.9)
            place: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "annotation_clip": False}
            right = panels[-1].get_yaxis_transform()
            panels[-1].annotate(text, (1.0, level), xycoords=right, va="center", fontsize=7, color=MUTED, **place)


def _clipped(values: pandas.Series) -> pandas.Series:
    return values.clip(LOWEST_SQNR, HIGHEST_SQNR)


def _labels(study: Study) -> list[str]:
    """The runs, the baseline of their comparison first."""
    if study.comparison is None or study.comparison.empty:
        return study.types
    baseline = str(study.comparison["baseline"].iloc[0])
    return [baseline, *(name for name in study.types if name != baseline)]


def _draw_lines(axes: Axes, series: Series, styles: dict[str, RunStyle]) -> None:
    from matplotlib.ticker import MaxNLocator

    for name, values in series.items():
        iterations = sorted(values)
        axes.plot(iterations, [values[iteration] for iteration in iterations], ms=4.5, **styles[name].options)
    axes.set_xlabel("iteration")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_bars(axes: Axes, series: Series, styles: dict[str, RunStyle], text: str) -> None:
    """One bar a run: there is one iteration only."""
    for row, (name, values) in enumerate(series.items()):
        for value in values.values():
            axes.barh(row, value, 0.55, color=styles[name].color, lw=0)
            label_end(axes, max(value, 0.0), row, text.format(value))
    axes.set_yticks(range(len(series)), [styles[name].title for name in series])
    axes.set_ylim(len(series) - 0.4, -0.6)
    axes.margins(x=0.2)
    axes.grid(visible=False, axis="y")
