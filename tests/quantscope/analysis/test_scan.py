import numpy as np
import pytest
import torch

from megatron.quantscope.analysis.details import collect_details
from megatron.quantscope.analysis.exponents import ExponentHistogram
from megatron.quantscope.analysis.format_errors import treatments
from megatron.quantscope.analysis.scan import ScanLog, distinct_records, scan
from megatron.quantscope.analysis.tables import read_table, summary_columns, write_table
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
    assert len(summary) == len(distinct_records(capture)) == len(index) - 12
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
        == (32, sum(record.bytes for record in distinct_records(capture)))
    )


def test_damaged_files_are_listed_and_the_rest_is_read(tmp_path):
    capture = open_capture(write_capture(tmp_path, layers=1))
    broken, gone, odd = (record.path for record in distinct_records(capture)[:3])
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


def figures_of(rows):
    """Rows less where their tensors lie."""
    where = ("file", "offset", "bytes", "reference")
    return sorted(repr({name: value for name, value in row.items() if name not in where}) for row in rows)


def test_a_segment_capture_gives_the_rows_of_a_pt_capture(tmp_path):
    """Also where two modules show the same tensor, whose bytes a segment holds once."""

    def chained(module, layer, name, tensor):
        return torch.ones_like(tensor) if (module, name) == ("self_attention.linear_qkv", "input") else tensor

    found = {}
    for save_format in ("pt", "segment"):
        directory = write_capture(
            tmp_path / save_format, layers=2, iterations=2, micro_batches=2, spoil=chained, save_format=save_format
        )
        rows, log = scanned(open_capture(directory))
        assert not log.problems
        found[save_format] = figures_of(rows)
    assert len(found["pt"]) == 2 * 2 * (32 + 28)  # the second micro-batch's weights are the first's
    assert found["segment"] == found["pt"]


def test_details_of_a_segment_capture_are_those_of_a_pt_capture(tmp_path):
    found = {}
    for save_format in ("pt", "segment"):
        for seed, quant_type in enumerate(("bf16", "mxfp4")):
            write_capture(tmp_path / save_format, quant_type, layers=1, seed=seed, save_format=save_format)
        rows, _ = scanned(open_capture(tmp_path / save_format))
        path = tmp_path / f"{save_format}.parquet"
        write_table(path, rows, summary_columns(one.name for one in TRIED))
        with worker_pool(1) as workers:
            found[save_format] = collect_details(read_table(path), workers)
    of_pt, of_segment = found["pt"], found["segment"]
    assert all(of_segment.values())
    for one, other in zip(of_pt["attention"], of_segment["attention"], strict=True):
        assert np.array_equal(one.maps, other.maps)
    for one, other in zip(of_pt["surfaces"], of_segment["surfaces"], strict=True):
        assert np.array_equal(one.values, other.values)


def test_rows_of_statistics_alone_come_from_the_manifest(tmp_path):
    write_capture(tmp_path, "bf16", layers=1)
    write_capture(tmp_path, "mxfp8", layers=1, mode="statistics")
    capture = open_capture(tmp_path)
    rows, log = scanned(capture)
    assert [row["quant_type"] for row in rows] == ["bf16"] * 32 + ["mxfp8"] * 32
    assert (log.files, log.without_tensor, log.problems) == (32, 32, [])
    assert {row["file"] for row in rows[32:]} == {None}


def test_only_the_records_that_are_asked_for(tmp_path):
    capture = open_capture(write_capture(tmp_path, layers=1))
    log = ScanLog()
    with worker_pool(1) as pool:
        rows = list(scan(capture, pool, TRIED, log, records=capture.records[3:5]))
    assert [row["file"] for row in rows] == [str(record.path) for record in capture.records[3:5]]
    assert log.files == 2


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
