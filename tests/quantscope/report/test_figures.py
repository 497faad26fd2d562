"""Every figure is drawn, from captures of every kind, and nothing in it is cut off at the edge of its page."""

import re
from pathlib import Path

import pytest
import torch

from megatron.quantscope.report.figures import FIGURES, QUICK, TOPICS, FigureSpec
from megatron.quantscope.report.render import Task, render, tasks_for
from megatron.quantscope.report.style import house_style
from tests.quantscope.analysis.captures import save, write_capture

TOPICS_OF_THE_DESIGN = {
    "quantization_analysis", "hifp8_analysis", "layer_analysis", "rank_analysis", "sample_analysis",
    "overflow_analysis", "distributions", "heatmaps", "comparisons", "attention_maps", "statistics",
}  # fmt: skip
TOPICS_OF_MANY = ("", "rank_analysis", "sample_analysis", "comparisons")  # what differs where there are many
ABSENT_FROM_ONE = {"rank_spread", "ranks_by_layer", "micro_batch_spread", "losses", "divergence"}
ABSENT_FROM_ONE |= {"error_growth", "worst_tensors"}
PNG = b"\x89PNG\r\n\x1a\n"
EDGE = 3  # pixels


def with_slow(values, quick):
    """Parameters, those that are not `quick` marked slow."""
    return [pytest.param(value, marks=() if quick(value) else pytest.mark.slow) for value in values]


def drawn(study, spec):
    """The figures of a spec, laid out: one a type, or one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    for task in tasks_for(study, [spec]):
        arguments = () if task.quant_type is None else (task.quant_type,)
        figure = spec.drawing()(study, *arguments)
        if figure is not None:
            FigureCanvasAgg(figure).draw()
            yield figure


def outside(figure):
    """The texts that leave the page."""
    from matplotlib.text import Text

    width, height = figure.canvas.get_width_height()
    renderer = figure.canvas.get_renderer()
    hidden = hidden_texts(figure)
    for text in figure.findobj(Text):
        if not text.get_visible() or not text.get_text().strip() or id(text) in hidden:
            continue
        box = text.get_window_extent(renderer)
        if box.x0 < -EDGE or box.y0 < -EDGE or box.x1 > width + EDGE or box.y1 > height + EDGE:
            yield text.get_text(), box


def hidden_texts(figure):
    """Texts of unused panels, and labels of ticks beyond the limits: matplotlib has them and does not draw them."""
    from matplotlib.text import Text

    hidden = set()
    for axes in figure.findobj(lambda artist: hasattr(artist, "xaxis")):
        if not axes.get_visible():
            hidden |= {id(text) for text in axes.findobj(Text)}
        for axis in (axes.xaxis, axes.yaxis, *([axes.zaxis] if hasattr(axes, "zaxis") else [])):
            lower, upper = sorted(axis.get_view_interval())
            for tick in (*axis.majorTicks, *axis.minorTicks):
                if not lower <= tick.get_loc() <= upper:
                    hidden |= {id(tick.label1), id(tick.label2)}
    return hidden


def test_the_topics_are_those_of_the_design():
    assert set(TOPICS) == TOPICS_OF_THE_DESIGN
    assert len({(spec.topic, spec.name) for spec in FIGURES}) == len(FIGURES)
    assert all(re.fullmatch(r"[a-z0-9_]+", spec.name) for spec in FIGURES)


@pytest.mark.parametrize("spec", FIGURES, ids=lambda spec: spec.name)
def test_a_capture_of_one_type_rank_and_micro_batch(small_study, spec):
    with house_style():
        figures = list(drawn(small_study, spec))
        assert len(figures) == (0 if spec.name in ABSENT_FROM_ONE else 1)
        for figure in figures:
            assert not list(outside(figure))


@pytest.mark.parametrize(
    "spec", with_slow(FIGURES, lambda spec: spec.topic in TOPICS_OF_MANY), ids=lambda spec: spec.name
)
def test_a_capture_of_many_types_ranks_and_micro_batches(wide_study, spec):
    with house_style():
        figures = list(drawn(wide_study, spec))
        assert len(figures) == (2 if spec.per_type else 1)
        for figure in figures:
            assert not list(outside(figure))


def _not_finite(module, layer, name, tensor):
    if name in ("output", "grad_output"):
        tensor = tensor.clone()
        tensor.view(-1)[:40] = float("nan")
        tensor.view(-1)[50] = float("inf")
    return tensor


ODD_CAPTURES = {
    "nan and inf": {"spoil": _not_finite},
    "all zero": {"spoil": lambda module, layer, name, tensor: torch.zeros_like(tensor)},
    "all not finite": {"spoil": lambda module, layer, name, tensor: torch.full_like(tensor, float("nan"))},
    "constant": {"spoil": lambda module, layer, name, tensor: torch.full_like(tensor, 0.5)},
    "huge": {"spoil": lambda module, layer, name, tensor: tensor * 1e30},
    "empty": {"spoil": lambda module, layer, name, tensor: tensor[:0]},
    "integers": {"spoil": lambda module, layer, name, tensor: tensor.int()},
    "one layer": {},
    "fp32": {"dtype": torch.float32},
    "fp16": {"dtype": torch.float16},
    "nvfp4": {"quant_type": "nvfp4"},
    "fp8_e4m3": {"quant_type": "fp8_e4m3"},
    "unknown type": {"quant_type": "custom"},
}


ODDEST = ("nan and inf", "all not finite", "empty")


def built(study):
    """Every figure of a study, put together but not rendered, which is what takes the time."""
    with house_style():
        for task in tasks_for(study, FIGURES):
            arguments = () if task.quant_type is None else (task.quant_type,)
            yield task.path, task.spec.drawing()(study, *arguments)


@pytest.mark.parametrize("kind", with_slow(ODD_CAPTURES, lambda kind: kind in ODDEST))
def test_odd_captures(study_of, tmp_path, kind):
    study = study_of(write_capture(tmp_path, layers=1, **ODD_CAPTURES[kind]))
    figures = dict(built(study))
    assert figures[Path("quick_analysis.png")] is not None
    assert len(figures) == len(FIGURES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ODD_CAPTURES)
def test_odd_captures_rendered(study_of, tmp_path, kind):
    study = study_of(write_capture(tmp_path / "in", layers=1, **ODD_CAPTURES[kind]))
    result = render(study, tasks_for(study, FIGURES), tmp_path / "out", 1)
    assert result.failed == {}
    assert Path("quick_analysis.png") in result.written


BARE_FILES = (
    "20241201_143022_1_linear_forward_mxfp8_input.pt",  # no layer
    "20241201_143022_1_linear_L0_forward_mxfp8_input.pt",
    "20241201_143022_1_attention_L0_forward_pre_FA_mxfp8_query.pt",
    "20241201_143022_1_router_L3_forward_pre_moe_mxfp8_logits.pt",
)


@pytest.mark.parametrize("name", with_slow(BARE_FILES, lambda name: "linear" not in name or "L0" not in name))
def test_one_bare_file_of_another_tool(study_of, tmp_path, name):
    (tmp_path / "in").mkdir()
    save(tmp_path / "in" / name, torch.randn(16, 2, 4, 8, generator=torch.Generator().manual_seed(0)))
    study = study_of(tmp_path / "in")
    figures = {path for path, figure in built(study) if figure is not None}
    assert {Path("quick_analysis.png"), Path("statistics/sites_mxfp8.png")} <= figures


def test_files_are_whole_pngs_at_the_places_that_tasks_say(small_study, tmp_path):
    specs = [spec for spec in FIGURES if spec.topic in ("", "rank_analysis")]
    seen = []
    result = render(small_study, tasks_for(small_study, specs), tmp_path, 2, lambda: seen.append(1))
    assert result.written == [Path("quick_analysis.png"), Path("rank_analysis/ranks_mxfp8.png")]
    alone = {Path(f"rank_analysis/{name}_mxfp8.png") for name in ("rank_spread", "ranks_by_layer")}
    assert result.left_out == dict.fromkeys(alone, "the capture has one rank")
    assert len(seen) == 4
    for path in result.written:
        assert (tmp_path / path).read_bytes().startswith(PNG)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "quick_analysis.png",
        "ranks_mxfp8.png",
    ]


def test_a_figure_that_fails_is_named_and_takes_no_other_with_it(small_study, tmp_path):
    broken = FigureSpec("statistics", "broken", "statistics:draw_nothing")
    result = render(small_study, [Task(broken, "mxfp8"), Task(QUICK, None)], tmp_path, 1)
    assert "AttributeError" in result.failed[Path("statistics/broken_mxfp8.png")]
    assert result.written == [Path("quick_analysis.png")]


def test_figures_do_not_depend_on_the_users_matplotlib_settings():
    import matplotlib

    with matplotlib.rc_context({"font.size": 30, "axes.titlesize": 50}), house_style():
        assert matplotlib.rcParams["font.size"] == 8
