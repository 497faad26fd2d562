"""The figures of runs side by side, drawn from tables that are made up."""

import math

import numpy as np
import pandas as pd
import pytest

from megatron.quantscope.analysis.study import Study
from megatron.quantscope.report.growth import draw_error_growth, draw_worst
from megatron.quantscope.report.run_style import run_styles, run_title
from megatron.quantscope.report.runs import draw_divergence, draw_losses
from megatron.quantscope.report.style import format_color, house_style
from tests.quantscope.report.test_figures import outside

FIGURES = (draw_divergence, draw_error_growth, draw_worst)
SITES = {"forward": ("qkv.x", "qkv.w", "qkv.y", "fc2.y"), "backward": ("fc2.dy", "fc2.dx", "qkv.dx")}


def table_of(
    labels=("mxfp8", "mxfp4"), layers=6, passes=("forward", "backward"), sqnr=lambda run, depth: 40.0 - 5 * run - depth
):
    """A table of made-up runs; `sqnr(number of the run, number of layers that were passed)`."""
    rows = []
    for number, label in enumerate(labels):
        places = [(name, depth, site) for name in passes for depth in range(layers) for site in SITES[name]]
        for order, (operation, depth, site) in enumerate(places):
            weight, backward = site.endswith(".w"), operation == "backward"
            value = math.inf if weight else sqnr(number, depth + layers * backward)
            rows.append(
                {
                    "run": label, "baseline": "bf16", "iteration": 0, "micro_batch": 0, "rank": 0, "order": order,
                    "layer_idx": layers - 1 - depth if backward else depth, "site": site, "operation": operation,
                    "family": "weight" if weight else "activation", "equal": value == math.inf,
                    "sqnr_db": value, "cosine": 0.9, "relative_l2": 0.1,
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def study_of(table, types=("bf16", "mxfp8", "mxfp4"), commits=None):
    summary = pd.DataFrame({"quant_type": list(types)})
    return Study(source="x", index=summary, summary=summary, comparison=table, commits=commits or {})


TABLES = {
    "two runs": table_of(),
    "one run": table_of(("mxfp4",)),
    "nine runs": table_of(tuple(f"commit{number}/mxfp8" for number in range(9))),
    "one layer": table_of(layers=1),
    "forward only": table_of(passes=("forward",)),
    "all equal": table_of(sqnr=lambda run, depth: math.inf),
    "all lost": table_of(sqnr=lambda run, depth: -math.inf),
    "equal, lost and far": table_of(sqnr=lambda run, depth: (math.inf, 300.0, -math.inf, -80.0, 12.0)[depth % 5]),
    "without iterations and layers": table_of().assign(
        iteration=np.nan, micro_batch=np.nan, rank=np.nan, layer_idx=np.nan
    ),
    "empty": table_of().head(0),
    "none": None,
}
ABSENT = {
    "all equal": {draw_worst},
    "without iterations and layers": {draw_divergence, draw_error_growth},
    "empty": set(FIGURES),
    "none": set(FIGURES),
}


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.__name__)
@pytest.mark.parametrize("kind", TABLES)
def test_every_table_is_drawn_within_its_page(kind, figure):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with house_style():
        page = figure(study_of(TABLES[kind]))
        assert (page is None) == (figure in ABSENT.get(kind, ()))
        if page is not None:
            FigureCanvasAgg(page).draw()
            assert not list(outside(page))


def lines_of(page, title):
    (axes,) = (axes for axes in page.axes if axes.get_title("left").startswith(title))
    return axes, {line.get_color(): line.get_xydata() for line in axes.lines if len(line.get_xdata()) > 2}


def test_divergence_shows_the_medians_forward_and_backward():
    with house_style():
        page = draw_divergence(study_of(table_of()))
    axes, forward = lines_of(page, "forward")
    np.testing.assert_allclose(forward[format_color("mxfp8")], [(layer, 40.0 - layer) for layer in range(6)])
    np.testing.assert_allclose(forward[format_color("mxfp4")], [(layer, 35.0 - layer) for layer in range(6)])
    axes, backward = lines_of(page, "backward")
    assert axes.xaxis_inverted()
    np.testing.assert_allclose(backward[format_color("mxfp8")], [(5 - passed, 34.0 - passed) for passed in range(6)])


def test_growth_has_sites_in_the_order_of_execution_and_no_weights():
    with house_style():
        page = draw_error_growth(study_of(table_of()))
    panels = {axes.get_title("left"): axes for axes in page.axes if axes.get_title("left")}
    assert list(panels) == ["MXFP8 E4M3, forward", "MXFP4, forward", "MXFP8 E4M3, backward", "MXFP4, backward"]
    assert [label.get_text() for label in panels["MXFP8 E4M3, backward"].get_yticklabels()] == list(SITES["backward"])
    (image,) = panels["MXFP8 E4M3, forward"].images
    np.testing.assert_allclose(image.get_array(), [[40.0 - layer for layer in range(6)]] * 3)


def test_the_worst_come_first():
    with house_style():
        page = draw_worst(study_of(table_of()))
    (axes,) = (axes for axes in page.axes if axes.get_title("left") == "MXFP4")
    assert [label.get_text() for label in axes.get_yticklabels()][:4] == [
        "fc2.dy L0",
        "fc2.dx L0",
        "qkv.dx L0",
        "fc2.dy L1",
    ]
    assert [bar.get_width() for bar in axes.patches][:4] == [24.0, 24.0, 24.0, 25.0]


def test_runs_of_one_type_differ_in_their_lines():
    styles = run_styles(["tp1/bf16", "tp2/bf16", "mxfp8"])
    assert [style.title for style in styles.values()] == ["tp1/BF16", "tp2/BF16", "MXFP8 E4M3"]
    assert styles["tp1/bf16"].color == styles["tp2/bf16"].color == format_color("bf16")
    assert styles["tp1/bf16"].line != styles["tp2/bf16"].line
    assert run_title("a/mxfp8@20261121") == "a/MXFP8 E4M3@20261121"


def test_losses_and_their_differences_over_iterations():
    commits = {"bf16": {0: {"lm loss": 4.0}, 1: {"lm loss": 2.0}}, "mxfp4": {0: {"lm loss": 5.0}, 1: {"lm loss": 2.0}}}
    with house_style():
        page = draw_losses(study_of(None, ("bf16", "mxfp4"), commits))
    values, differences = ([line.get_ydata().tolist() for line in axes.lines] for axes in page.axes)
    assert values == [[4.0, 2.0], [5.0, 2.0]]
    assert differences == [[0.0, 0.0], [25.0, 0.0]]


def test_losses_are_compared_with_the_baseline_of_the_comparison():
    """Labels of two captures have no order of their own."""
    commits = {"after/bf16": {0: {"lm loss": 5.0}}, "before/bf16": {0: {"lm loss": 4.0}}}
    table = table_of(("after/bf16",)).assign(baseline="before/bf16")
    with house_style():
        page = draw_losses(study_of(table, ("after/bf16", "before/bf16"), commits))
    losses, differences = page.axes
    assert [label.get_text() for label in losses.get_yticklabels()] == ["before/BF16", "after/BF16"]
    assert [bar.get_width() for bar in differences.patches] == [0.0, 25.0]
