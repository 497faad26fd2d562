"""comparisons/: runs of several types side by side: their losses, and where they part along the depth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.quantscope.analysis.divergence import Divergence
from megatron.quantscope.analysis.losses import loss_differences, losses_by_type
from megatron.quantscope.analysis.roles import site_order
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.report.axes import label_end, set_layer_axis
from megatron.quantscope.report.page import format_legend, new_page
from megatron.quantscope.report.panels import add_panels, rows_for
from megatron.quantscope.report.style import FAINT, format_color, format_marker, format_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series = dict[str, dict[int, float]]

_HIGHEST_SQNR = 60.0
_COLUMNS = 5


def draw_losses(study: Study) -> Figure | None:
    """The loss of every type against the iteration, and its difference to the baseline's."""
    losses = losses_by_type(study.commits, study.types)
    iterations = {iteration for by_iteration in losses.values() for iteration in by_iteration}
    if len(losses) * len(iterations) < 2:
        return None
    baseline = next(iter(losses))
    one_iteration = len(iterations) == 1
    panels_shown = ["lm loss", f"difference to {format_title(baseline)}, %"][: len(losses)]
    page = new_page(
        9.5,
        0.9 + 0.3 * len(losses) if one_iteration else 3.0,
        title="Loss of the captured iterations by quant type",
        note="lm loss as the commit records hold it, and its difference in percent where both have the iteration; "
        "below about 0.5 % it can be the order of summation.",
        study=study,
        legend=() if one_iteration else format_legend(list(losses)),
    )
    panels = add_panels(page, panels_shown, 2, sharey=one_iteration)
    series = (losses, loss_differences(losses, baseline))
    for axes, values, text in zip(panels.of.values(), series, ("{:.3f}", "{:+.2f} %"), strict=False):
        if one_iteration:
            _draw_bars(axes, values, text)
        else:
            _draw_lines(axes, values)
    return page


def draw_divergence(study: Study) -> Figure | None:
    """SQNR of the results of every run against the baseline's, along the depth."""
    if not study.divergences:
        return None
    baseline = study.divergences[0].pair.baseline
    forward = sorted({one.pair.site for one in study.divergences if one.pair.symbol != "dx"}, key=site_order)
    backward = sorted({one.pair.site for one in study.divergences if one.pair.symbol == "dx"}, key=site_order)
    sites = [*forward, *backward]
    types = list(dict.fromkeys(one.pair.quant_type for one in study.divergences))
    page = new_page(
        1.2 + 2.35 * min(_COLUMNS, len(sites)),
        0.3 + 1.65 * rows_for(len(sites), _COLUMNS),
        title=f"Where runs part from the {format_title(baseline)} run",
        note=f"SQNR of each result with the {format_title(baseline)} run's tensor as the signal: everything that "
        f"quantisation did up to there, on the first micro-batch of the same samples; cut off at {_HIGHEST_SQNR:g} dB. "
        "At 0 dB the error is as large as the signal. The backward pass (dx) runs from the last layer to the first.",
        study=study,
        legend=format_legend(types),
    )
    panels = add_panels(page, sites, _COLUMNS, sharex=True, sharey=True)
    for site, axes in panels.of.items():
        _draw_site(axes, [one for one in study.divergences if one.pair.site == site], types)
    panels.label(x="layer", y="SQNR, dB")
    return page


def _draw_lines(axes: Axes, series: Series) -> None:
    from matplotlib.ticker import MaxNLocator

    for name, values in series.items():
        iterations = sorted(values)
        style: dict[str, Any] = {"color": format_color(name), "marker": format_marker(name), "ms": 4.5}
        axes.plot(iterations, [values[iteration] for iteration in iterations], **style)
    axes.set_xlabel("iteration")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_bars(axes: Axes, series: Series, text: str) -> None:
    """One bar a type: there is one iteration only."""
    for row, (name, values) in enumerate(series.items()):
        for value in values.values():
            axes.barh(row, value, 0.55, color=format_color(name), lw=0)
            label_end(axes, max(value, 0.0), row, text.format(value))
    axes.set_yticks(range(len(series)), [format_title(name) for name in series])
    axes.set_ylim(len(series) - 0.4, -0.6)
    axes.margins(x=0.2)
    axes.grid(visible=False, axis="y")


def _draw_site(axes: Axes, found: list[Divergence], types: list[str]) -> None:
    for name in types:
        of_type = sorted((one for one in found if one.pair.quant_type == name), key=lambda one: one.pair.layer)
        shown = {one.pair.layer: min(one.sqnr_db, _HIGHEST_SQNR) for one in of_type if one.sqnr_db > -float("inf")}
        style: dict[str, Any] = {"color": format_color(name), "marker": format_marker(name), "ms": 2.4, "lw": 1.1}
        axes.plot(list(shown), list(shown.values()), **style)
    axes.axhline(0, color=FAINT, lw=0.8)
    set_layer_axis(axes, sorted({one.pair.layer for one in found}))
