import numpy as np
import pandas as pd
import pytest
import torch

from megatron.quantscope.analysis.comparison import COLUMNS, ComparisonLog, compare, compare_pairs, pair_runs, runs_of
from megatron.quantscope.analysis.workers import worker_pool
from megatron.quantscope.capture import open_capture
from tests.quantscope.analysis.captures import save, write_capture


def scaled(factor):
    """Everything but weights, multiplied."""
    return lambda module, layer, name, tensor: tensor if name == "weight" else tensor * factor


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("capture")
    write_capture(directory, "bf16", layers=2, micro_batches=2)
    write_capture(directory, "mxfp4", layers=2, micro_batches=2, spoil=scaled(1.5))
    write_capture(directory, "fp16", layers=2, micro_batches=2)
    return directory


def test_the_table(directory, compared):
    table, log = compared(directory)
    assert list(table.columns) == list(COLUMNS)
    assert table["run"].unique().tolist() == ["fp16", "mxfp4"]
    assert set(table["baseline"]) == {"bf16"}
    assert table[table["run"] == "fp16"]["equal"].all()
    worse = table[(table["run"] == "mxfp4") & (table["family"] != "weight")]
    assert not worse["equal"].any()
    np.testing.assert_allclose(worse["sqnr_db"], 20 * np.log10(1 / 0.5), atol=0.05)  # 1.5 x, rounded to bf16
    np.testing.assert_allclose(worse["relative_l2"], 0.5, rtol=0.01)
    np.testing.assert_allclose(worse["cosine"], 1.0, atol=1e-4)
    assert (log.read + log.unread, log.unread) == (len(table), int(table["equal"].sum()))
    assert log.problems == log.notes == []


def test_rows_say_what_they_compare(directory, compared):
    table, _ = compared(directory)
    row = table[(table["run"] == "mxfp4") & (table["site"] == "fc2.dy")].iloc[-1]
    numbers = {"micro_batch": 1, "sample_idx": 1, "layer_idx": 1, "rank": 0, "iteration": 0, "count": 32 * 48}
    assert row[list(numbers)].to_dict() == numbers
    assert row["module"] == "decoder.layers.1.mlp.linear_fc2"
    texts = {
        "symbol": "dy", "family": "gradient", "operation": "backward", "phase": "pre", "tensor_name": "grad_output"
    }  # fmt: skip
    assert row[list(texts)].to_dict() == texts
    assert table.groupby("run")["order"].is_monotonic_increasing.all()


def test_progress_counts_every_byte_that_is_read(directory):
    pairing, seen, log = pair_runs(runs_of([open_capture(directory)])), [], ComparisonLog()
    with worker_pool(1) as workers:
        compare_pairs(pairing, workers, advance=seen.append, log=log)
    assert sum(seen) == pairing.bytes == log.bytes > 0


def test_in_other_processes(directory, compared):
    expected, _ = compared(directory)
    with worker_pool(2) as workers:
        found = compare(runs_of([open_capture(directory)]), workers)
    pd.testing.assert_frame_equal(found, expected)


def test_nothing_to_compare(tmp_path, compared):
    table, log = compared(write_capture(tmp_path, layers=1))
    assert table.empty
    assert list(table.columns) == list(COLUMNS)
    assert log == ComparisonLog()


def test_two_commits(tmp_path, compared):
    write_capture(tmp_path / "before", "mxfp8", layers=1)
    write_capture(tmp_path / "after", "mxfp8", layers=1, run_id="20261122_120000_bbbbbb", spoil=scaled(1.0))
    table, log = compared(tmp_path / "before", tmp_path / "after")
    assert set(table["run"]) == {"after/mxfp8"}
    assert set(table["baseline"]) == {"before/mxfp8"}
    assert table["equal"].all()
    assert (log.read, log.bytes) == (0, 0)


class TestProblems:
    def test_a_damaged_file_is_a_line_and_the_others_are_compared(self, tmp_path, compared):
        for seed, quant_type in enumerate(("bf16", "fp16", "mxfp8")):
            write_capture(tmp_path, quant_type, layers=1, spoil=scaled(1.0 + seed))
        for quant_type, name in (("bf16", "query"), ("fp16", "key")):
            (file,) = (tmp_path / quant_type).glob(f"*_pre_*_{name}.pt")
            content = bytearray(file.read_bytes())
            content[:4] = b"nope"
            file.write_bytes(content)
        table, log = compared(tmp_path)
        assert [problem.partition(":")[0] for problem in log.problems] == ["bf16", "fp16"]
        assert "query.pt is not a torch file" in log.problems[0]
        assert len(table) == 2 * (4 * 6 + 8) - 2 - 1

    def test_shapes_that_differ(self, tmp_path, compared):
        write_capture(tmp_path, "bf16", layers=1)
        write_capture(tmp_path, "fp16", layers=1, spoil=lambda module, layer, name, x: x[:3] if name == "query" else x)
        table, log = compared(tmp_path)
        (problem,) = log.problems
        assert "query.pt: can not be compared: shapes differ: (3, 1, 4, 16), and (32, 1, 4, 16)" in problem
        assert "attn.q" not in set(table["site"])


def test_bare_files_are_told_apart_by_the_metadata_inside_them(tmp_path, compared):
    for quant_type, scale in (("bf16", 1.0), ("fp16", 2.0)):
        (tmp_path / quant_type).mkdir()
        name = f"20241201_143022_0001_iter003_linear_L4_backward_pre_linear_{quant_type}_rank0_sample9_grad_output.pt"
        metadata = {"module": "decoder.layers.4.mlp.linear_fc2", "grad_scale": scale}
        save(tmp_path / quant_type / name, torch.ones(3) * scale, **metadata)
    table, log = compared(tmp_path)
    assert log.problems == []
    (row,) = table.to_dict("records")
    found = (row["site"], row["layer_idx"], row["iteration"], row["sample_idx"], row["sqnr_db"])
    assert found == ("fc2.dy", 4, 3, 9, np.inf)


def test_what_older_names_do_not_tell_is_null(tmp_path, compared):
    for quant_type in ("bf16", "fp16"):
        (tmp_path / quant_type).mkdir()
        save(tmp_path / quant_type / f"20241201_143022_1_linear_L4_forward_{quant_type}_input.pt", torch.ones(3))
    table, _ = compared(tmp_path)
    (row,) = table.to_dict("records")
    assert (row["site"], row["layer_idx"], row["equal"]) == ("linear.x", 4, True)
    assert table[["iteration", "micro_batch", "sample_idx", "rank", "module"]].isna().all(axis=None)
