import pandas as pd
import pytest

from megatron.quantscope.analysis.comparison import ComparisonLog, compare, runs_of
from megatron.quantscope.analysis.workers import worker_pool
from megatron.quantscope.capture import open_capture
from megatron.quantscope.report.comparison_text import comparison_text, write_comparison
from tests.quantscope.analysis.captures import write_capture


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("capture")
    write_capture(directory, "bf16", layers=2, iterations=2)
    write_capture(directory, "fp16", layers=2, iterations=1)
    write_capture(directory, "mxfp4", layers=2, spoil=lambda module, layer, name, x: x * (1 + 0.2 * (layer + 1)))
    return runs_of([open_capture(directory)])


@pytest.fixture(scope="module")
def compared(runs):
    log = ComparisonLog()
    with worker_pool(1) as workers:
        return compare(runs, workers, log=log), log


def test_the_files(compared, runs, tmp_path):
    table, log = compared
    path = write_comparison(table, tmp_path / "out", log=log, runs=runs)
    assert path == tmp_path / "out" / "comparison.txt"
    assert sorted(file.name for file in path.parent.iterdir()) == ["comparison.parquet", "comparison.txt"]
    pd.testing.assert_frame_equal(pd.read_parquet(path.with_name("comparison.parquet")), table)
    assert path.read_text() == comparison_text(table, log=log, runs=runs)


def test_what_the_text_says(compared, runs):
    table, log = compared
    text = comparison_text(table, log=log, runs=runs)
    lines = text.splitlines()
    assert lines[0] == f"Comparison of fp16, mxfp4 with bf16: {len(table)} pairs of tensors"
    assert "fp16: all 64 tensors are equal to those of bf16, bit by bit." in lines
    assert any(
        line.startswith("mxfp4: 64 of 64 tensors are not equal to those of bf16; the first is ") for line in lines
    )
    sites = lines[lines.index("-- every site") + 1 :]
    assert sites[0].split()[:2] == ["site", "tensors"]
    of_mxfp4 = table[(table["run"] == "mxfp4") & (table["site"] == "qkv.x")]
    assert sites[1].split()[:5] == ["qkv.x", "2", "0", f"{of_mxfp4['sqnr_db'].mean():.1f}", "8.0"]
    assert sites[1].split()[-1] == f"{of_mxfp4['max_error'].max():.4g}"
    at = lines.index("-- median SQNR of every layer in dB, weights left out")
    assert [line.split() for line in lines[at + 2 : at + 4]] == [
        ["0", "exact", "14.0", "exact", "14.0"],
        ["1", "exact", "8.0", "exact", "8.0"],
    ]
    losses = lines.index("-- lm loss, and its difference to that of bf16")
    assert lines[losses + 2].split() == [
        "0", "3.04000", "+0.000", "%", "3.04000", "+0.000", "%", "3.05000", "+0.329", "%",
    ]  # fmt: skip
    assert lines[losses + 3].split() == ["1", "2.94000", "+0.000", "%", "-", "-", "-", "-"]
    assert "== without a partner: 2" in lines
    assert "   bf16: 64 tensors have no partner in fp16" in lines
    assert lines[-1] == "== not compared: nothing"


def test_nothing_in_common(tmp_path):
    table = pd.DataFrame({"run": [], "baseline": [], "equal": [], "sqnr_db": [], "iteration": [], "operation": []})
    text = comparison_text(table, log=ComparisonLog(problems=["fp16: x.pt is damaged"]))
    assert text.startswith("Comparison: no tensor of one run has a partner in another\n")
    assert "== not compared: 1\n   fp16: x.pt is damaged" in text
