from pathlib import Path

import pytest

from megatron.quantscope.analysis.comparison.runs import runs_of, type_of_label
from megatron.quantscope.capture.reader import Capture
from megatron.quantscope.capture.record import TensorRecord


def capture(directory, *types, run_id="r"):
    records = [
        TensorRecord(layer_type="linear", operation="forward", quant_type=name, tensor_name="input", path=None, bytes=0)
        for name in types
    ]
    return Capture(directory=directory, records=records, run_info={name: {"run_id": run_id} for name in types})


def labels(*captures):
    return [run.label for run in runs_of(captures)]


def test_types_of_one_capture_the_plainest_first(tmp_path):
    found = labels(capture(tmp_path, "mxfp4", "hifp8", "custom", "fp16", "mxfp8", "bf16"))
    assert found == ["bf16", "fp16", "mxfp8", "mxfp4", "hifp8", "custom"]


def test_the_first_capture_gives_the_baseline_whatever_the_second_holds(tmp_path):
    runs = runs_of([capture(tmp_path / "a", "mxfp8"), capture(tmp_path / "b", "bf16", "mxfp8")])
    assert [run.label for run in runs] == ["a/mxfp8", "bf16", "b/mxfp8"]
    assert [run.capture.directory.name for run in runs] == ["a", "b", "b"]
    assert [len(run.records) for run in runs] == [1, 1, 1]


@pytest.mark.parametrize(
    ("captures", "expected"),
    [
        ((("x/a", "r"), ("x/b", "r")), ["a/bf16", "b/bf16"]),
        ((("x/a", "r"), ("y/a", "r")), ["x/a/bf16", "y/a/bf16"]),
        ((("x/a", "r"), ("x/a", "s")), ["a/bf16@r", "a/bf16@s"]),
        ((("x/a", "r"), ("x/a", "r")), ["a/bf16@r (1)", "a/bf16@r (2)"]),
        ((("x/bf16", "r"), ("y/bf16", "r")), ["x/bf16", "y/bf16"]),  # opened by their type folders
    ],
)
def test_labels_tell_runs_apart(tmp_path, monkeypatch, captures, expected):
    monkeypatch.chdir(tmp_path)
    found = labels(*(capture(Path(directory), "bf16", run_id=run) for directory, run in captures))
    assert found == expected
    assert {type_of_label(label) for label in found} == {"bf16"}
