"""Figures of parts of a capture: nothing is left for some of them, and one that is drawn warns of nothing."""

import warnings
from pathlib import Path

import pandas as pd
import pytest

from megatron.quantscope.analysis.analyse import analyse
from megatron.quantscope.analysis.errors import AnalysisError
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.capture import open_capture
from megatron.quantscope.report import places, quantization
from megatron.quantscope.report.figures import FIGURES, FigureSpec
from megatron.quantscope.report.progress import Progress
from megatron.quantscope.report.render import Task, render
from megatron.quantscope.report.style import house_style
from tests.quantscope.analysis.captures import write_capture


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    """A table whose lists stay on disk, as those of a real analysis."""
    folder = tmp_path_factory.mktemp("few")
    capture = open_capture(write_capture(folder / "in", layers=2))
    return analyse(capture, folder / "out", 1, Progress(shown=False), details=False).summary


def study_of(frame):
    return Study(source="x", index=frame, summary=frame)


PARTS = {
    "a weight of one layer": lambda frame: frame[(frame["layer_idx"] == 0) & (frame["site"] == "fc2.w")],
    "no numbered layer": lambda frame: frame.assign(layer_idx=float("nan")),
    "all NaN": lambda frame: frame.assign(amax=float("nan"), rms=float("nan"), nan=frame["count"]),
    "ranks with nothing in common": lambda frame: pd.concat(
        [frame[frame["site"] == site].assign(rank=rank) for rank, site in enumerate(("fc1.x", "fc2.x", "fc2.w"))]
    ),
}
OF_LISTS = ("boxes", "normal_quantiles", "channel_amax", "channel_curves", "ranks_by_layer", "sqnr_by_layer")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("spec", [spec for spec in FIGURES if spec.name in OF_LISTS], ids=lambda spec: spec.name)
def test_a_part_of_a_capture_is_drawn_or_left_out_without_a_warning(summary, part, spec):
    with warnings.catch_warnings(), house_style():
        warnings.simplefilter("error")
        figure = spec.drawing()(study_of(PARTS[part](summary)), "mxfp8")
        if figure is not None:
            from matplotlib.backends.backend_agg import FigureCanvasAgg

            FigureCanvasAgg(figure).draw()


def test_a_site_that_no_format_applies_to_is_an_empty_panel(summary):
    tried = [column for column in summary if column.endswith((".sqnr_db", ".error_squares"))]
    odd = summary.assign(**{column: summary[column].where(summary["site"] != "fc2.x") for column in tried})
    with house_style():
        figure = quantization.draw_sqnr_by_layer(study_of(odd), "mxfp8")
    lines = {axes.get_title(loc="left"): len(axes.lines) for axes in figure.axes}
    assert lines["fc2.x"] == 0
    assert lines["fc1.x"] > 0


def note_and_ranks(figure):
    texts = " ".join(text.get_text().replace("\n", " ") for text in figure.texts)
    return texts, [label.get_text() for label in figure.axes[0].get_yticklabels()]


def ranks(summary, count, off):
    """Rows of `count` ranks that agree, but for the one that is `off`: its tensors are 16 times as large."""
    rows = summary[summary["site"] == "fc2.x"]
    return pd.concat(
        [rows.assign(rank=rank, sum_squares=rows["sum_squares"] * (256 if rank == off else 1)) for rank in range(count)]
    )


def test_of_many_ranks_the_farthest_are_shown_and_the_note_says_so(summary):
    with house_style():
        figure = places.draw_ranks_by_layer(study_of(ranks(summary, 70, off=68)), "mxfp8")
    note, names = note_and_ranks(figure)
    assert "Of 70 ranks the 64 that are farthest are shown, the farthest first." in note
    assert names[:3] == ["rank 68", "rank 0", "rank 1"]
    assert len(names) == 64


def test_few_ranks_are_in_their_order_and_all_there(summary):
    with house_style():
        figure = places.draw_ranks_by_layer(study_of(ranks(summary, 3, off=2)), "mxfp8")
    note, names = note_and_ranks(figure)
    assert names == ["rank 0", "rank 1", "rank 2"]
    assert "farthest first" not in note


def test_what_matplotlib_warns_of_goes_to_the_log(summary, tmp_path, monkeypatch, caplog):
    from matplotlib.figure import Figure

    def crowded(study):
        figure = Figure(figsize=(1, 1), layout="constrained")
        figure.subplots().set_title("far too long " * 20)
        return figure

    monkeypatch.setattr("megatron.quantscope.report.runs.draw_losses", crowded)
    spec = FigureSpec("comparisons", "losses", "runs:draw_losses", per_type=False)
    with warnings.catch_warnings(), caplog.at_level("INFO"):
        warnings.simplefilter("error")
        result = render(study_of(summary), [Task(spec, None)], tmp_path, 1)
    assert result.written == [Path("comparisons/losses.png")]
    assert "comparisons/losses.png: constrained_layout not applied" in caplog.text


def test_a_table_that_another_run_replaced_ends_the_drawing(summary, tmp_path, monkeypatch):
    def replaced(study):
        raise AnalysisError("was replaced")

    monkeypatch.setattr("megatron.quantscope.report.runs.draw_losses", replaced)
    spec = FigureSpec("comparisons", "losses", "runs:draw_losses", per_type=False)
    with pytest.raises(AnalysisError, match="was replaced"):
        render(study_of(summary), [Task(spec, None)], tmp_path, 1)
    assert not [path for path in Path(tmp_path).rglob("*") if path.is_file()]
