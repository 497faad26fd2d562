import numpy as np
import pytest
import torch

from megatron.quantscope.analysis.exponents import ExponentHistogram
from megatron.quantscope.analysis.format_errors import treatments
from megatron.quantscope.analysis.scan import ScanLog, distinct_files, scan
from megatron.quantscope.analysis.tables import summary_columns, write_table
from megatron.quantscope.analysis.workers import worker_pool
from megatron.quantscope.capture import open_capture
from tests.quantscope.analysis.captures import save, write_capture

TRIED = treatments()


def scanned(capture, workers=1):
    log = ScanLog()
    with worker_pool(workers) as pool:
        rows = list(scan(capture, pool, TRIED, log))
    return rows, log


def test_every_file_is_read_once_and_references_are_not(capture, tables):
    index, summary, _ = tables
    assert len(index) == len(capture.records)
    assert index["reference"].sum() == 3 * 4  # the backward rows of the weights
    assert len(summary) == len(distinct_files(capture)) == len(index) - 12
    assert summary["file"].is_unique


def test_rows_hold_what_the_tensor_holds(capture, tables):
    _, summary, _ = tables
    for record in capture.records[:: len(capture.records) // 7]:
        row = summary[summary["file"] == str(record.path)].iloc[0]
        x = capture.load(record).double().numpy()
        assert row["count"] == x.size
        assert tuple(row["shape"]) == x.shape
        assert row["amax"] == np.abs(x).max()
        assert row["rms"] == pytest.approx(np.sqrt(np.square(x).mean()), rel=1e-12)
        histogram = ExponentHistogram(row["exponent_first"], np.asarray(row["exponent_counts"]))
        assert histogram.total == row["count"] - row["zero"]
        assert np.sum(row["block_depths"]) == row["count"] - row["zero"]
        assert len(row["channel_amax"]) == x[0, 0].size if x.ndim > 2 else x.shape[1]


def test_workers_in_processes_give_the_same_rows(tmp_path):
    capture = open_capture(write_capture(tmp_path, layers=1))
    alone, log = scanned(capture, 1)
    together, log_together = scanned(capture, 2)
    assert repr(alone) == repr(together)
    assert (
        (log.files, log.bytes)
        == (log_together.files, log_together.bytes)
        == (32, sum(record.bytes for record in distinct_files(capture)))
    )


def test_damaged_files_are_listed_and_the_rest_is_read(tmp_path):
    capture = open_capture(write_capture(tmp_path, layers=1))
    broken, gone, odd = (record.path for record in distinct_files(capture)[:3])
    content = bytearray(broken.read_bytes())
    content[40:400] = b"\xff" * 360  # the pickle inside the archive; its size and its end are as they were
    broken.write_bytes(content)
    gone.unlink()
    torch.save({"tensor": torch.ones(3, dtype=torch.complex64), "metadata": {}}, odd)
    rows, log = scanned(capture)
    assert len(rows) == 32 - 3
    assert {problem.file for problem in log.problems} == {broken, gone, odd}
    assert all("\n" not in problem.reason for problem in log.problems)


def test_bare_files_of_all_three_name_forms(tmp_path):
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    names = {
        "20241201_143022_0001_iter004_linear_L3_forward_pre_linear_mxfp8_rank1_sample9_input.pt": ("x", 3, 4),
        "20241201_143022_2_linear_L1_backward_pre_linear_mxfp8_input.pt": ("dy", 1, None),
        "20241201_143022_3_attention_L2_forward_mxfp8_context.pt": ("o", 2, None),
    }
    for name in names:
        save(tmp_path / name, x)
    rows, log = scanned(open_capture(tmp_path))
    assert not log.problems
    found = {row["file"].rsplit("/", 1)[1]: (row["symbol"], row["layer_idx"], row["iteration"]) for row in rows}
    assert found == names
    assert all(row["count"] == 256 and row["dtype"] == "bfloat16" for row in rows)


def test_a_table_is_complete_or_absent(tmp_path):
    def rows():
        yield {"file": "a"}
        raise KeyboardInterrupt

    path = tmp_path / "summary.parquet"
    path.write_text("what was there")
    with pytest.raises(KeyboardInterrupt):
        write_table(path, rows(), summary_columns(["mxfp8"]))
    assert [file.name for file in tmp_path.iterdir()] == ["summary.parquet"]
    assert path.read_text() == "what was there"
