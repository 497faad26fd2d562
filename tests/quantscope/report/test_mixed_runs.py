"""Figures and texts of a run that gave its tensors several formats."""

from dataclasses import replace

import numpy as np
import pytest

from megatron.quantscope.report.layers import draw_underflow
from megatron.quantscope.report.statistics import draw_table
from megatron.quantscope.report.text import tensor_text


@pytest.fixture
def mixed_study(small_study):
    """The small study as if layer 0 had been in MXFP4 and the gradients of the others in HiF8, scales rounded up."""
    summary = small_study.summary
    names = summary["layer_idx"].map(lambda layer: "mxfp4" if layer == 0 else "mxfp8_rceil")
    names = names.mask(summary["family"].eq("gradient") & summary["layer_idx"].ne(0), "hifp8_pow2")
    return replace(small_study, summary=summary.assign(trained_as=names.where(summary["operand"])))


@pytest.fixture
def partly_study(small_study):
    """The small study as if attention and layer 0 had been left as they were, and weights MXFP8 in dgrad alone."""
    summary = small_study.summary
    names = summary["symbol"].map(lambda symbol: "mxfp8@2" if symbol == "w" else "mxfp8")
    quantised = summary["operand"] & ~summary["site"].str.startswith("attn") & summary["layer_idx"].ne(0)
    return replace(small_study, summary=summary.assign(trained_as=names.where(quantised)))


def texts_of(figure):
    return " ".join(text.get_text().replace("\n", " ") for text in figure.texts)


def test_figures_are_under_each_operands_own_format(mixed_study):
    underflow, table = (texts_of(draw(mixed_study, "mxfp8")) for draw in (draw_underflow, draw_table))
    assert "Underflow of every operand under its own format" in underflow
    assert "formats of this run: HiF8, MXFP4, MXFP8 E4M3 (rceil)" in underflow
    assert "under each operand's own format (HiF8, MXFP4, MXFP8 E4M3 (rceil))" in table


def test_a_run_of_one_format_is_shown_under_it(small_study):
    assert "under MXFP8 E4M3" in texts_of(draw_underflow(small_study, "mxfp8"))
    assert "a mixed run" not in tensor_text(small_study)


def test_the_text_lists_what_was_quantised_to_what(mixed_study):
    lines = tensor_text(mixed_study).splitlines()
    start = lines.index("-- a mixed run: what the operands were quantised to (@2: in the second of their GEMMs alone)")
    told = " ".join(lines[start : lines.index("", start)])
    assert "mxfp4 in layer 0: qkv.x, qkv.w, qkv.dy, attn.q" in told
    assert "mxfp8_rceil in layers 1-2: qkv.x, qkv.w, attn.q" in told
    assert "hifp8 in layers 1-2: qkv.dy, attn.do, proj.dy, fc1.dy, fc2.dy" in told


def test_nothing_is_said_of_operands_that_were_left_as_they_were(partly_study):
    figure = draw_underflow(partly_study, "mxfp8")
    assert "formats of this run: MXFP8 E4M3, MXFP8 E4M3 in the second GEMM" in texts_of(figure)
    drawn = {}
    for axes in figure.axes:
        if axes.images:
            values = axes.images[0].get_array().filled(np.nan)
            drawn |= dict(zip([label.get_text() for label in axes.get_yticklabels()], values, strict=True))
    assert np.isnan(drawn["attn.q"]).all()
    assert np.isnan(drawn["qkv.y"]).all()
    for site in ("qkv.x", "qkv.w", "fc2.dy"):
        assert np.isfinite(drawn[site]).tolist() == [False, True, True], site
    told = " ".join(tensor_text(partly_study).split())
    assert "as it was in layer 0: qkv.x, qkv.w, qkv.dy, proj.x" in told
    assert "as it was in layers 0-2: attn.q, attn.k" in told
    assert "mxfp8@2 in layers 1-2: qkv.w, proj.w, fc1.w, fc2.w" in told
    assert "mxfp8 in layers 1-2: qkv.x, qkv.dy" in told
