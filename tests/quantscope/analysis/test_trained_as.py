"""What a run with several formats did to each tensor: from metadata to columns, and into the texts."""

import numpy as np
import pandas as pd
import pytest

from megatron.quantscope.analysis.aggregate import as_trained, merged
from megatron.quantscope.analysis.trained_as import (
    OWN,
    is_mixed,
    layers_by_treatment,
    own_treatments,
    trained_as,
    with_own,
)
from megatron.quantscope.capture.record import TensorRecord

MIXED = {
    "fprop": {"x": "mxfp8", "w": "none"},
    "dgrad": {"dy": "hifp8", "w": "none"},
    "wgrad": {"dy": "hifp8", "x": "mxfp4"},
    "scale_rule": "rceil",
    "grad_scale": "pow2-amax",
}


def record(tensor_name, formats, layer_type="linear"):
    operation = "backward" if tensor_name.startswith("grad") else "forward"
    return TensorRecord(
        path=None,
        bytes=0,
        layer_type=layer_type,
        operation=operation,
        quant_type="ends",
        tensor_name=tensor_name,
        formats=formats,
    )


@pytest.mark.parametrize(
    ("tensor_name", "changes", "expected"),
    [
        ("input", {}, "mxfp8_rceil"),
        ("input", {"scale_rule": "floor"}, "mxfp8"),
        ("weight", {}, None),
        ("output", {}, None),
        ("grad_output", {}, "hifp8_pow2"),
        ("grad_output", {"grad_scale": "none"}, "hifp8"),
        ("grad_output", {"dgrad": {"dy": "mxfp8_e5m2", "w": "none"}}, "mxfp8_e5m2_rceil"),
        ("input", {"fprop": {"x": "nvfp4", "w": "none"}}, "nvfp4"),
        ("input", {"fprop": {"x": "of another tool", "w": "none"}}, None),
        ("input", {"fprop": "what?"}, None),
        ("input", {"fprop": {"x": ["mxfp8"]}}, None),
        ("input", {"fprop": {"x": "none", "w": "none"}}, "mxfp4_rceil@2"),
        ("input", {"fprop": {"x": "none"}, "wgrad": {"x": "hifp8"}}, "hifp8"),  # no blocks: alike along any axis
        ("weight", {"dgrad": {"dy": "none", "w": "mxfp4"}, "scale_rule": "floor"}, "mxfp4@2"),
        ("grad_output", {"dgrad": {"dy": "none"}, "wgrad": {"dy": "mxfp8_e5m2"}}, "mxfp8_e5m2_rceil@2"),
    ],
)
def test_the_metadata_say_which_treatment_it_was(tensor_name, changes, expected):
    assert trained_as(record(tensor_name, MIXED | changes)) == expected


def test_without_formats_nothing_is_said():
    assert trained_as(record("input", {})) is None
    attention = {"scores": {"q": "mxfp4", "k": "mxfp4"}, "scale_rule": "floor", "grad_scale": "none"}
    assert trained_as(record("query", attention, "attention")) == "mxfp4"
    assert trained_as(record("value", attention, "attention")) is None


@pytest.fixture
def summary():
    """Rows of one run: two formats, one operand as it was, one result."""
    rows = [
        ("fc1.x", 0, "activation", True, "mxfp8_rceil", 100),
        ("fc1.x", 1, "activation", True, "mxfp4", 200),
        ("fc1.w", 0, "weight", True, None, 300),
        ("fc1.dy", 0, "gradient", True, "hifp8_pow2", 400),
        ("fc1.y", 0, "activation", False, None, 500),
    ]
    frame = pd.DataFrame(rows, columns=["site", "layer_idx", "family", "operand", "trained_as", "count"])
    zeros = dict.fromkeys(["zero", "nan", "inf", "bytes", "sum", "blocks", "zero_blocks"], 0)
    frame = frame.assign(**zeros, sum_squares=1.0, amax=1.0, max=1.0, min=0.0, kurtosis=3.0)
    names = {"mxfp8_rceil": 1, "mxfp4": 2, "hifp8": 3, "hifp8_pow2": 4, "fp16": 5, "fp16_pow2": 6}
    for name, number in names.items():
        parts = {"error_squares": 10.0**-number, "underflow": number, "saturated": 0, "lost": 0, "dead_blocks": 0}
        frame = frame.assign(**{f"{name}.{part}": value for part, value in parts.items()})
        frame[f"{name}.sqnr_db"] = 10.0 * number
    return frame


def test_own_columns_are_those_of_the_treatment_that_each_row_names(summary):
    frame = with_own(as_trained(summary))
    assert frame[f"{OWN}.sqnr_db"].tolist()[:2] == [10.0, 20.0]
    assert frame[f"{OWN}.sqnr_db"][3] == 40.0  # the scaled treatment of a gradient
    assert np.isnan(frame[f"{OWN}.sqnr_db"][[2, 4]]).all()
    sites = merged(frame, "site")
    assert sites.loc["fc1.x", f"{OWN}.underflow_percent"] == pytest.approx(100 * (1 + 2) / 300)
    assert sites.loc["fc1.x", f"{OWN}.sqnr_db"] == pytest.approx(10 * np.log10(2.0 / (0.1 + 0.01)))
    assert np.isnan(sites.loc["fc1.w", f"{OWN}.sqnr_db"])


def test_a_run_is_mixed_when_a_tensor_had_another_treatment_than_the_named_one(summary):
    assert own_treatments(summary) == ["hifp8", "mxfp4", "mxfp8_rceil"]
    assert is_mixed(summary, "mxfp8")
    assert not is_mixed(summary[summary["trained_as"] == "mxfp4"], "mxfp4")
    assert is_mixed(summary[summary["trained_as"] == "mxfp4"], "mxfp8")
    assert not is_mixed(summary[summary["trained_as"].isna()], "mxfp8")
    assert not is_mixed(summary.drop(columns="trained_as"), "mxfp8")


def test_a_run_that_left_some_operands_as_they_were_is_mixed(summary):
    kept = summary[summary["site"].isin(["fc1.w", "fc1.y"]) | summary["trained_as"].eq("mxfp4")]
    assert own_treatments(kept) == ["mxfp4"]
    assert is_mixed(kept, "mxfp4")
    assert not is_mixed(kept[kept["site"] != "fc1.w"], "mxfp4")  # a result is no operand


def test_own_columns_of_an_operand_that_only_its_second_gemm_had_quantised(summary):
    columns = {name: summary[name].add(1) for name in summary if name.startswith("mxfp4.")}
    second = summary.assign(**{name.replace("mxfp4", "mxfp4@2"): column for name, column in columns.items()})
    second.loc[1, "trained_as"] = "mxfp4@2"
    assert with_own(as_trained(second)).loc[1, f"{OWN}.sqnr_db"] == summary.loc[1, "mxfp4.sqnr_db"] + 1


def test_which_layers_had_which_treatment(summary):
    assert layers_by_treatment(summary) == {
        "fc1.x": {"mxfp8_rceil": [0], "mxfp4": [1]},
        "fc1.w": {None: [0]},
        "fc1.dy": {"hifp8": [0]},
    }
