"""Of a capture in statistics mode the rows are those of the same tensors kept, as far as statistics go."""

from dataclasses import replace

import numpy as np
import pytest

from megatron.quantscope.analysis.analyse import analyse
from megatron.quantscope.analysis.manifest_row import manifest_row
from megatron.quantscope.analysis.tables import STATISTICS_COLUMNS
from megatron.quantscope.capture import open_capture
from megatron.quantscope.report.progress import Progress
from tests.quantscope.analysis.captures import write_capture

PART = ["module", "tensor_name", "operation", "micro_batch"]
ROUNDED = ("sum", "sum_squares", "mean", "rms", "std")  # the manifest holds sums as float64
LAST_AXIS = ("x", "w", "dy", "y", "dx", "dw", "q", "k")  # symbols whose first cut runs along the last axis


def run(directory, out):
    return analyse(open_capture(directory), out, 1, Progress(shown=False), ["mxfp8"])


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The summary of a capture of tensors, and of one of the same tensors' statistics."""
    folder = tmp_path_factory.mktemp("both")
    for mode in ("tensors", "statistics"):
        write_capture(folder / mode, layers=2, mode=mode)
    return [run(folder / mode, folder / f"out-{mode}") for mode in ("tensors", "statistics")]


def test_statistics_and_exponents_are_those_of_the_tensors(both):
    kept, told = (study.summary.set_index(PART).sort_index() for study in both)
    assert len(told) == len(kept) == 64
    assert told.index.equals(kept.index)
    for column in STATISTICS_COLUMNS:
        tolerance = 1e-9 if column in ROUNDED else 0
        np.testing.assert_allclose(
            told[column].to_numpy(float), kept[column].to_numpy(float), rtol=tolerance, atol=1e-12
        )
    assert told["exponent_first"].tolist() == kept["exponent_first"].tolist()
    assert all(map(np.array_equal, told["exponent_counts"], kept["exponent_counts"]))


def test_block_exponents_are_those_of_the_tensors_where_blocks_run_along_the_last_axis(both):
    kept, told = (study.summary.set_index(PART).sort_index() for study in both)
    compared = 0
    for (_, one), (_, other) in zip(told.iterrows(), kept.iterrows(), strict=True):
        linear = one["layer_type"] == "linear"
        if linear or (one["symbol"] in LAST_AXIS):
            assert one["block_exponent_first"] == other["block_exponent_first"]
            assert np.array_equal(one["block_exponent_counts"], other["block_exponent_counts"])
            assert one["blocks"] == other["blocks"]
            compared += 1
        if (one["layer_type"], one["symbol"]) == ("attention", "v"):
            assert len(one["block_exponent_counts"]) == 0
    assert compared >= 2 * 24


def test_what_takes_the_elements_is_absent(both):
    _, study = both
    summary = study.summary
    assert study.problems == []
    assert summary["file"].isna().all()
    for column in ("mxfp8.sqnr_db", "mxfp8.error_squares", "kurtosis", "median_magnitude"):
        assert summary[column].isna().all()
    assert all(len(values) == 0 for column in ("quantiles", "channel_amax", "top") for values in summary[column])
    assert study.attention == study.surfaces == []


def test_a_mixed_capture_has_rows_of_both(tmp_path):
    write_capture(tmp_path / "in", "bf16", layers=1)
    write_capture(tmp_path / "in", "mxfp8", layers=1, mode="statistics")
    study = run(tmp_path / "in", tmp_path / "out")
    assert study.problems == []
    by_type = study.summary.groupby("quant_type")["file"].count()
    assert by_type.to_dict() == {"bf16": 32, "mxfp8": 0}
    assert len(study.of_type("mxfp8")) == 32
    assert study.surfaces
    assert study.scan.files + study.scan.without_tensor + study.scan.reused == 64


def test_a_row_without_statistics_is_a_row(tmp_path):
    capture = open_capture(write_capture(tmp_path / "in", layers=1, mode="statistics"))
    row = manifest_row(replace(capture.records[0], statistics=None, blocks=None))
    assert row["site"] == "qkv.x"
    assert "count" not in row
