"""A comparison is made once, and again when anything that it follows from has changed."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from megatron.quantscope.analysis import comparison
from megatron.quantscope.analysis.analyse import analyse
from megatron.quantscope.analysis.comparison import pair_runs, runs_of
from megatron.quantscope.analysis.kept_comparison import COMPARISON_TABLE, digest_of, keep_comparison, kept_comparison
from megatron.quantscope.capture import open_capture
from megatron.quantscope.report.progress import Progress
from tests.quantscope.analysis.captures import save, write_capture

NAME = "20241201_143022_0001_iter000_linear_L0_forward_pre_linear_{}_rank0_sample0_input.pt"


@pytest.fixture
def compared(monkeypatch):
    """How many pairs were compared, call by call."""
    counts, compare = [], comparison.compare_pairs

    def comparing(pairing, *args, **more):
        counts.append(len(pairing.pairs))
        return compare(pairing, *args, **more)

    monkeypatch.setattr(comparison, "compare_pairs", comparing)
    return counts


def bare_runs(folder):
    folder.mkdir()
    for quant_type, value in (("bf16", 1.0), ("mxfp8", 1.5)):
        save(folder / NAME.format(quant_type), torch.full((4, 32), value))
    return folder


def run(directory, out, **settings):
    return analyse(open_capture(directory), out, 1, Progress(shown=False), ["mxfp8"], **settings)


def test_a_second_call_reads_the_same_table_back(tmp_path, compared):
    for quant_type, seed in (("bf16", 0), ("mxfp8", 1)):
        write_capture(tmp_path / "in", quant_type, layers=1, seed=seed)
    first = run(tmp_path / "in", tmp_path / "out")
    before = (tmp_path / "out" / COMPARISON_TABLE).read_bytes()
    second = run(tmp_path / "in", tmp_path / "out", comparison=False)
    assert len(compared) == 1
    assert len(first.comparison) == 32
    pd.testing.assert_frame_equal(first.comparison, second.comparison)
    assert first.findings == second.findings
    assert (tmp_path / "out" / COMPARISON_TABLE).read_bytes() == before
    pd.testing.assert_frame_equal(first.comparison, pd.read_parquet(tmp_path / "out" / COMPARISON_TABLE))


def test_what_has_changed_is_compared_again(tmp_path, compared):
    folder, out = bare_runs(tmp_path / "in"), tmp_path / "out"
    assert run(folder, out).comparison["relative_l2"].tolist() == [0.5]
    save(folder / NAME.format("mxfp8"), torch.full((4, 32), 3.0).double())
    assert run(folder, out, comparison=False).comparison is None
    assert run(folder, out).comparison["relative_l2"].tolist() == [2.0]
    (out / COMPARISON_TABLE).write_bytes(b"junk")
    assert run(folder, out).comparison["relative_l2"].tolist() == [2.0]
    assert len(compared) == 3


def test_nothing_is_compared_that_is_not_wanted(tmp_path, compared):
    study = run(bare_runs(tmp_path / "in"), tmp_path / "out", comparison=False)
    assert (study.comparison, compared) == (None, [])
    assert not (tmp_path / "out" / COMPARISON_TABLE).exists()


def test_pairs_that_could_not_be_compared_are_tried_again(tmp_path, compared):
    folder = bare_runs(tmp_path / "in")
    save(folder / NAME.format("mxfp8"), torch.ones(3, 32))
    studies = [run(folder, tmp_path / "out") for _ in range(2)]
    assert compared == [1, 1]
    assert all("can not be compared" in study.problems[0] for study in studies)


def test_the_digest_tells_content_scale_and_order(tmp_path):
    capture = open_capture(bare_runs(tmp_path / "in"))
    digest = digest_of(pair_runs(runs_of([capture])))
    assert digest == digest_of(pair_runs(runs_of([open_capture(tmp_path / "in")])))
    for change in ({"checksum": "x:1"}, {"grad_scale": 2.0}, {"layer_idx": 5}):
        records = [replace(record, **change) for record in capture.records]
        assert digest_of(pair_runs(runs_of([replace(capture, records=records)]))) != digest
    capture.records[0].path.unlink()
    assert digest_of(pair_runs(runs_of([capture]))) is None


def test_a_table_without_a_digest_is_never_read_back(tmp_path):
    keep_comparison(tmp_path, pd.DataFrame({name: [] for name in comparison.COLUMNS}), None)
    assert [path.name for path in tmp_path.iterdir()] == [COMPARISON_TABLE]
    assert kept_comparison(tmp_path, None) is None
    assert kept_comparison(tmp_path, "x") is None
