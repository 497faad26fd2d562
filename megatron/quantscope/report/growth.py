"""comparisons/: where in the network runs are far from the baseline: all sites of all layers, and the worst tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.quantscope.analysis.aggregate import Floats
from megatron.quantscope.analysis.comparison.growth import first_iteration, flowing
from megatron.quantscope.analysis.comparison.parting import by_run, worst
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.capture.metadata import BACKWARD, FORWARD
from megatron.quantscope.report import numbers
from megatron.quantscope.report.axes import draw_site_image, label_end
from megatron.quantscope.report.page import new_page
from megatron.quantscope.report.panels import add_panels, add_placed_panels, color_bar, rows_for
from megatron.quantscope.report.run_style import RunStyle, run_styles, run_title
from megatron.quantscope.report.runs import HIGHEST_SQNR, LOWEST_SQNR
from megatron.quantscope.report.style import ALARM, SEQUENTIAL

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 4
_MOST_RUNS = 8
_LEAST_WIDTH = 6.0  # inches, for the title
_WORST = 15
_LOST_DB = -60.0  # where the bar of a tensor that lost values ends
_LABEL_ROOM = 0.75  # of the axis, right of the bars


@dataclass(frozen=True)
class _Pass:
    """The sites of one pass in the order of execution, the layers, and label -> [sites, layers] the lowest SQNR."""

    sites: list[str]
    layers: list[int]
    images: dict[str, Floats]


def draw_error_growth(study: Study) -> Figure | None:
    """SQNR of every site of every layer against the baseline's, an image a run and pass."""
    from matplotlib.colors import Normalize

    table = study.comparison
    if table is None or table.empty:
        return None
    baseline, runs = run_title(str(table["baseline"].iloc[0])), list(table["run"].unique())[:_MOST_RUNS]
    rows = {name: flowing(first_iteration(table), name) for name in (FORWARD, BACKWARD)}
    passes = {name: _pass_of(of_pass, runs) for name, of_pass in rows.items() if len(of_pass)}
    if not passes:
        return None
    heights = [len(one.sites) for one in passes.values()] * rows_for(len(runs), _COLUMNS)
    page = new_page(
        max(_LEAST_WIDTH, 1.9 + 2.5 * min(_COLUMNS, len(runs))),
        0.3 * len(heights) + 0.16 * sum(heights),
        title=f"Distance to the {baseline} run at every site of every layer",
        note=f"SQNR with the {baseline} run's tensor as the signal, first iteration, the worst of a cell; dark is far, "
        f"and {HIGHEST_SQNR:g} dB also stands for equal. Rows are in the order of execution: forward through the "
        "layers, then backward from the last. Red: values were lost to Inf or NaN." + _of_many(table),
        study=study,
    )
    finite = np.concatenate([np.r_[0.0, v[np.isfinite(v)]] for one in passes.values() for v in one.images.values()])
    norm = Normalize(max(LOWEST_SQNR, float(finite.min())), HIGHEST_SQNR)
    places = {
        (run, name): ((number // _COLUMNS) * len(passes) + row, number % _COLUMNS)
        for number, run in enumerate(runs)
        for row, name in enumerate(passes)
    }
    titles = {f"{run_title(run)}, {name}": place for (run, name), place in places.items()}
    panels = add_placed_panels(page, titles, gridspec_kw={"height_ratios": heights})
    for (run, name), (row, column) in places.items():
        drawn = _draw_image(panels.grid[row, column], passes[name], run, norm)
    _label_outside_only(panels.grid)
    color_bar(page, drawn, list(panels.of.values()), "SQNR, dB", aspect=35)
    return page


def draw_worst(study: Study) -> Figure | None:
    """The tensors of the lowest SQNR of every run."""
    table = study.comparison
    if table is None or table["equal"].all():
        return None
    found = {name: rows for name, of_run in by_run(table) if len(rows := worst(of_run, _WORST))}
    found = dict(list(found.items())[:_MOST_RUNS])
    baseline = run_title(str(table["baseline"].iloc[0]))
    page = new_page(
        max(_LEAST_WIDTH, 0.8 + 2.9 * min(_COLUMNS, len(found))),
        rows_for(len(found), _COLUMNS) * (0.5 + 0.17 * _WORST),
        title=f"The tensors farthest from the {baseline} run",
        note=f"The {_WORST} lowest SQNRs of each run, with the {baseline} run's tensor as the signal, and their "
        "cosine. Below 0 dB the error is larger than the signal; lost: values became Inf or NaN." + _of_many(table),
        study=study,
    )
    styles = run_styles(list(found))
    panels = add_panels(page, [styles[name].title for name in found], _COLUMNS, sharex=True)
    for name, rows in found.items():
        _draw_ranking(panels.of[styles[name].title], rows, styles[name])
    ends = np.concatenate([_bars(rows) for rows in found.values()] + [np.zeros(1)])
    room = _LABEL_ROOM * max(1.0, float(ends.max() - ends.min()))
    panels.first.set_xlim(1.03 * ends.min(), ends.max() + room)
    panels.label(x="SQNR, dB")
    return page


def _of_many(table: pandas.DataFrame) -> str:
    """What a note says where runs are left out."""
    count = table["run"].nunique()
    return f" The first {_MOST_RUNS} of {count} runs." if count > _MOST_RUNS else ""


def _pass_of(rows: pandas.DataFrame, runs: list[str]) -> _Pass:
    first = rows.groupby("site")["order"].min().sort_values()
    sites, layers = [str(site) for site in first.index], sorted(rows["layer_idx"].unique())
    images = {}
    for run in runs:
        cells = rows[rows["run"] == run].groupby(["site", "layer_idx"])["sqnr_db"].min().unstack("layer_idx")
        images[run] = cells.reindex(index=sites, columns=layers).to_numpy(float)
    return _Pass(sites, [int(layer) for layer in layers], images)


def _draw_image(axes: Axes, of_pass: _Pass, run: str, norm: Any) -> Any:
    values = of_pass.images[run]
    shown = np.clip(values, norm.vmin, norm.vmax)
    shown[np.isneginf(values)] = norm.vmin - 1
    image = draw_site_image(axes, of_pass.sites, of_pass.layers, shown, norm, SEQUENTIAL)
    image.set_cmap(image.get_cmap().with_extremes(under=ALARM))
    axes.tick_params(axis="y", labelsize=6.5)
    return image


def _label_outside_only(grid: Any) -> None:
    """Sites at the left, "layer" at the foot: all panels of a row show the same sites."""
    for (_, column), axes in np.ndenumerate(grid):
        if column:
            axes.set_yticks([])
    for axes in grid[:-1].flat:
        axes.set_xlabel("")


def _bars(rows: pandas.DataFrame) -> Floats:
    """Where the bars end."""
    ends: Floats = rows["sqnr_db"].clip(_LOST_DB, HIGHEST_SQNR).to_numpy(float)
    return ends


def _draw_ranking(axes: Axes, rows: pandas.DataFrame, style: RunStyle) -> None:
    """Bars from 0 dB, the worst on top."""
    axes.barh(range(len(rows)), _bars(rows), 0.6, color=style.color, lw=0)
    for place, (value, (_, row)) in enumerate(zip(_bars(rows), rows.iterrows(), strict=True)):
        cosine = "" if row["cosine"] != row["cosine"] else f"  cos {row['cosine']:.3f}"
        label_end(axes, max(value, 0.0), place, numbers.decibels(row["sqnr_db"]) + cosine)
    axes.set_yticks(range(len(rows)), [_title(row) for _, row in rows.iterrows()], fontsize=6.5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _title(row: pandas.Series) -> str:
    """`fc2.dx L3`, with rank and iteration where they are not the first."""
    parts = [str(row["site"])]
    for letter, column in (("L", "layer_idx"), ("rank ", "rank"), ("iter ", "iteration")):
        if row[column] == row[column] and (row[column] or letter == "L"):
            parts.append(f"{letter}{int(row[column])}")
    return " ".join(parts)
