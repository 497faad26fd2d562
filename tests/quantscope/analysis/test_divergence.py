import numpy as np
import pytest
import torch

from megatron.quantscope.analysis.details import collect_details
from megatron.quantscope.analysis.divergence import DivergencePair, compare_pair, divergence_pairs
from megatron.quantscope.analysis.format_errors import treatments
from megatron.quantscope.analysis.scan import ScanLog, scan
from megatron.quantscope.analysis.study import ordered_types
from megatron.quantscope.analysis.tables import read_table, summary_columns, write_table
from megatron.quantscope.analysis.workers import worker_pool
from megatron.quantscope.capture import open_capture
from megatron.quantscope.capture.location import Location
from tests.quantscope.analysis.captures import save, write_capture


def pair_of(tmp_path, x, reference):
    return DivergencePair(
        quant_type="mxfp4", baseline="bf16", site="fc2.y", symbol="y", layer=0,
        location=Location(save(tmp_path / "x.pt", x)), baseline_location=Location(save(tmp_path / "r.pt", reference)),
    )  # fmt: skip


def test_against_numpy(tmp_path):
    reference = torch.randn(100, 7, generator=torch.Generator().manual_seed(0))
    x = reference + 0.1 * torch.randn(100, 7, generator=torch.Generator().manual_seed(1))
    found = compare_pair(pair_of(tmp_path, x, reference))
    a, b = x.double().numpy().ravel(), reference.double().numpy().ravel()
    assert found.sqnr_db == pytest.approx(10 * np.log10((b @ b) / ((a - b) @ (a - b))), rel=1e-9)
    assert found.cosine == pytest.approx(a @ b / np.sqrt((a @ a) * (b @ b)), rel=1e-9)


def test_equal_not_finite_and_not_comparable(tmp_path):
    one = torch.ones(3)
    assert compare_pair(pair_of(tmp_path, one, one)).sqnr_db == np.inf
    assert compare_pair(pair_of(tmp_path, one * float("nan"), one)).sqnr_db == -np.inf
    assert compare_pair(pair_of(tmp_path, torch.ones(4), one)) is None


def test_each_result_meets_its_partner_of_the_same_sample(tmp_path):
    for quant_type in ("mxfp4", "bf16"):
        scale = 1.0 if quant_type == "bf16" else 1.5
        write_capture(
            tmp_path, quant_type, layers=2, iterations=2, spoil=lambda m, layer, name, x, scale=scale: x * scale
        )
    tried = treatments()
    with worker_pool(1) as pool:
        rows = scan(open_capture(tmp_path), pool, tried, ScanLog())
        write_table(tmp_path / "s.parquet", rows, summary_columns(one.name for one in tried))
        summary = read_table(tmp_path / "s.parquet")
        found = collect_details(summary, pool)["divergences"]
    assert len(found) == 2 * (4 + 1 + 4)  # layers x (y, o, dx), of the first iteration only
    assert {one.pair.baseline for one in found} == {"bf16"}
    for one in found:
        assert one.sqnr_db == pytest.approx(20 * np.log10(1 / 0.5), abs=0.05)  # 1.5 x against x, rounded to bf16
        assert one.cosine == pytest.approx(1.0, abs=1e-4)
    assert divergence_pairs(summary[summary["quant_type"] == "bf16"], "bf16") == []


def test_the_least_quantised_type_is_the_baseline():
    assert ordered_types(["mxfp4", "hifp8", "custom", "fp16", "mxfp8", "bf16"]) == [
        "bf16", "fp16", "mxfp8", "mxfp4", "hifp8", "custom",
    ]  # fmt: skip
