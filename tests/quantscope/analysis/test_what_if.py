import numpy as np
import pandas as pd
import pytest
import torch

from megatron.quantscope.analysis.format_errors import Treatment, treatments
from megatron.quantscope.analysis.roles import role_of
from megatron.quantscope.analysis.what_if import FIGURES, IDENTITY, as_quantized, block_map, what_if

RESULTS = ["y", "dx", "dw", "o", "dq", "dk", "dv"]


@pytest.fixture
def summary(tables):
    return tables[1]


def test_a_row_a_tensor_gemm_format_and_rule(summary):
    table = what_if(summary)
    assert list(table) == [*IDENTITY, "gemm", "format", "scale_rule", "scaled", *FIGURES]
    ways = {(one.format, one.scale_rule, one.scaled) for one in treatments()}
    assert len(table) == len(ways) * sum(max(1, len(gemms)) for gemms in summary["gemms"])
    assert not table.duplicated([*IDENTITY, "gemm", "format", "scale_rule", "scaled"]).any()
    assert set(zip(table["format"], table["scale_rule"], table["scaled"], strict=True)) == ways
    assert (table["gemm"].isna() == table["symbol"].isin(RESULTS)).all()
    assert set(table["gemm"].dropna()) == {"fprop", "dgrad", "wgrad", "scores", "context", "dp", "dv", "dq", "dk"}


def test_figures_are_those_of_the_use(summary):
    table = what_if(summary)
    row = summary[(summary["site"] == "fc1.x") & (summary["layer_idx"] == 1)].iloc[0]
    mine = table[(table["site"] == "fc1.x") & (table["layer_idx"] == 1)]
    mine = mine.set_index(["gemm", "format", "scale_rule", "scaled"])
    for gemm, suffix in (("fprop", ""), ("wgrad", "@2")):
        found = mine.loc[(gemm, "mxfp4", "rceil", False)]
        assert found["sqnr_db"] == pytest.approx(row[f"mxfp4_rceil{suffix}.sqnr_db"], rel=1e-12)
        nonzero = row["count"] - row["zero"]
        assert found["underflow_percent"] == pytest.approx(100 * row[f"mxfp4_rceil{suffix}.underflow"] / nonzero)
        scaled = mine.loc[(gemm, "hifp8", "floor", True)]
        assert scaled["sqnr_db"] == pytest.approx(row["hifp8_pow2.sqnr_db"], rel=1e-12)
    assert row["mxfp4_rceil.sqnr_db"] != row["mxfp4_rceil@2.sqnr_db"]


def test_groups_are_merged_exactly(summary):
    table = what_if(summary, by=["site"]).set_index(["site", "gemm", "format", "scale_rule", "scaled"])
    rows = summary[summary["site"] == "attn.do"]
    for gemm, suffix in (("dp", ""), ("dv", "@2")):
        error, signal = rows[f"mxfp8{suffix}.error_squares"].sum(), rows["sum_squares"].sum()
        found = table.loc[("attn.do", gemm, "mxfp8", "floor", False)]
        assert found["relative_error"] == pytest.approx(np.sqrt(error / signal), rel=1e-12)
        assert found["dead_blocks"] == rows[f"mxfp8{suffix}.dead_blocks"].sum()


def test_tables_of_some_formats_of_none_and_without_rows(summary):
    errors = [column for column in summary if "." in column]
    kept = [column for column in summary if column not in errors or column.startswith(("mxfp4.", "mxfp4@2."))]
    assert set(what_if(summary[kept])["format"]) == {"mxfp4"}
    untried = summary.drop(columns=errors).join(pd.DataFrame(np.nan, index=summary.index, columns=errors))
    for nothing in (summary[:0], untried, summary.drop(columns=errors)):
        table = what_if(nothing)
        assert table.empty
        assert list(table) == [*IDENTITY, "gemm", "format", "scale_rule", "scaled", *FIGURES]


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_rceil@2", "nvfp4@2", "hifp8", "hifp8_pow2", "fp8_e4m3", "bf16"])
def test_block_maps_add_up_to_the_tensor(name):
    treatment, role = Treatment.named(name), role_of("linear", "grad_output")
    dy = 1e-5 * torch.randn(20, 2, 70, generator=torch.Generator().manual_seed(0))
    found, q = block_map(dy, role, treatment), as_quantized(dy, role, treatment)
    block = treatment.record.block or 32
    assert tuple(found.error.shape) == ((-(-40 // block), 70) if treatment.use else (20, 2, -(-70 // block)))
    x = role.cuts[treatment.use].view(dy)[0].double().numpy()
    assert float(found.error.sum()) == pytest.approx(np.square(x - q.double().numpy()).sum(), rel=1e-9)
    assert float(found.signal.sum()) == pytest.approx(np.square(x).sum(), rel=1e-9)
    assert found.amax.max() == dy.abs().max()
    assert int(found.underflow.sum()) == int((q == 0).sum() - (dy == 0).sum())


def test_what_has_no_second_use_has_no_map_of_it():
    with pytest.raises(ValueError, match="mxfp4@2 is of use 2, and linear output has 1"):
        block_map(torch.ones(2, 3), role_of("linear", "output"), Treatment("mxfp4", use=1))
