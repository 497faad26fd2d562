"""Shares, agreement, losses, band use, surfaces and the global statistics."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch

from megatron.quantscope.analysis.agreement import micro_batches, ranks, spread_by_layer
from megatron.quantscope.analysis.band_use import (
    HIFP8,
    band_percentages,
    full_precision_percent,
    histograms_by_symbol,
    scaled_exponents,
)
from megatron.quantscope.analysis.exponents import ExponentHistogram, precision_bands
from megatron.quantscope.analysis.format_errors import Treatment, as_scaled, pow2_scale
from megatron.quantscope.analysis.global_statistics import global_statistics
from megatron.quantscope.analysis.losses import loss_differences, losses_by_type
from megatron.quantscope.analysis.shares import shares
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.analysis.surfaces import SurfacePlace, surface_places, view_surface
from megatron.quantscope.capture.location import Location
from megatron.quantscope.formats import measure
from tests.quantscope.analysis.captures import save


def test_shares_count_rows_files_bytes_and_elements(tables):
    index, summary, _ = tables
    table = shares(index, summary, "operation")
    assert table["rows"].to_dict() == {"forward": 3 * (3 * 4 + 4), "backward": 3 * (4 * 4 + 4)}
    assert table["rows"].sum() == len(index)
    assert table["files"].sum() == len(summary)
    assert table["elements"].sum() == summary["count"].sum()
    assert table["percent"].sum() == pytest.approx(100)
    of_unknown = shares(index.assign(component=None), summary.assign(component=None), "component")
    assert of_unknown.index.tolist() == ["unknown"]


def test_parts_are_named_by_what_is_known_and_sorted():
    frame = pd.DataFrame(
        {"rank": [1, 0, np.nan], "iteration": [0, 0, 10], "micro_batch": [1, 0, np.nan], "sample_idx": [3, 2, np.nan]}
    )
    assert ranks(frame)["part"].tolist() == ["rank 1", "rank 0", "rank not told"]
    divided = micro_batches(frame)
    assert divided["part"].tolist() == [
        "iteration 0, micro-batch 1, sample 3",
        "iteration 0, micro-batch 0, sample 2",
        "iteration 10",
    ]
    assert divided.sort_values("order").index.tolist() == [1, 0, 2]


def test_spread_is_the_ratio_of_the_largest_to_the_smallest_rms(tables):
    _, summary, _ = tables
    doubled = summary.assign(rank=1, sum_squares=summary["sum_squares"] * 16)
    sites, layers, values = spread_by_layer(ranks(pd.concat([summary, doubled])))
    assert layers == [0, 1, 2]
    assert len(sites) == 32
    np.testing.assert_allclose(values, 2.0)


def test_losses_and_their_differences():
    commits = {"mxfp8": {0: {"lm loss": 3.3}, 1: {"lm loss": math.nan}}, "bf16": {0: {"lm loss": 3.0}}, "fp16": {}}
    losses = losses_by_type(commits, ["bf16", "fp16", "mxfp8"])
    assert losses == {"bf16": {0: 3.0}, "mxfp8": {0: 3.3}}
    differences = loss_differences(losses, "bf16")
    assert differences["mxfp8"][0] == pytest.approx(10.0)
    assert differences["bf16"] == {0: 0.0}


def frame_of(tensors, family):
    rows = []
    for x in tensors:
        statistics = measure(x)
        histogram = ExponentHistogram.of(statistics.exponents)
        rows.append(
            {"symbol": "dy", "family": family, "amax": statistics.amax, "nan": statistics.nan, "inf": statistics.inf,
             "exponent_first": histogram.first,
             "exponent_counts": histogram.counts}
        )  # fmt: skip
    return pd.DataFrame(rows)


def test_scaling_shifts_bins_exactly_as_multiplying_does():
    tensors = [(torch.randn(64, 64, generator=torch.Generator().manual_seed(s)) * 10.0**-s).bfloat16() for s in (2, 5)]
    found = scaled_exponents(frame_of(tensors, "gradient"), HIFP8)
    scaled = [x.double() * pow2_scale(float(x.abs().max()), HIFP8.full_precision_max) for x in tensors]
    expected = ExponentHistogram.of(measure(torch.cat(scaled)).exponents)
    assert (found.first, found.counts.tolist()) == (expected.first, expected.counts.tolist())
    assert all(7.5 < x.abs().max() <= 15 for x in scaled)


@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_a_tensor_that_is_not_finite_is_scaled_as_training_does_it(odd):
    x = torch.full((4, 32), 2.0**-20).bfloat16()
    x[0, 0] = odd
    scaled, _ = as_scaled(x, Treatment(HIFP8.name, scaled=True), measure(x))
    expected = ExponentHistogram.of(measure(scaled).exponents)
    found = scaled_exponents(frame_of([x], "gradient"), HIFP8)
    assert (found.first, found.counts.tolist()) == (expected.first, expected.counts.tolist()) == (-20, [127])
    assert full_precision_percent(frame_of([x], "gradient")) == 0


def test_band_percentages_add_up_and_agree_with_the_values():
    x = torch.exp2(torch.linspace(-30, 20, 5001, dtype=torch.float64))
    bands = precision_bands(HIFP8)
    found = band_percentages(ExponentHistogram.of(measure(x).exponents), bands)
    assert found.sum() == pytest.approx(100)
    values = x.numpy()
    for percent, band in zip(found, bands, strict=True):
        inside = (values >= 2.0**band.lower) & (values < 2.0**band.upper)
        assert percent == pytest.approx(100 * inside.mean())


def test_band_use_of_gradients_is_shown_scaled_too():
    frame = frame_of([torch.full((4,), 2.0**-20)], "gradient")
    assert list(histograms_by_symbol(frame)) == ["dy", "dy, scaled"]
    assert full_precision_percent(frame) == 100
    assert full_precision_percent(frame_of([torch.full((4,), 2.0**-20)], "activation")) == 0
    assert math.isnan(full_precision_percent(frame_of([torch.zeros(4)], "activation")))


def worst_operands(summary, fmt="mxfp8", count=2):
    """The sites whose operands lose most, by hand: the lowest SQNR of each site, the lowest sites first."""
    operands = summary[summary["operand"] & summary["symbol"].ne("p")]
    return operands.groupby("site")[f"{fmt}.sqnr_db"].min().nsmallest(count).index


def test_surfaces_are_of_the_most_pronounced_tensors(tables, tmp_path):
    _, summary, details = tables
    spiked = summary.assign(amax=summary["amax"].where(summary["site"] != "fc2.y", 1e6))
    places = surface_places(spiked)
    outliers, lossy = ([place for place in places if place.outliers is kind] for kind in (True, False))
    assert places[0].site == "fc2.y"
    assert len({place.site for place in outliers}) == len(outliers) == 4
    assert [place.site for place in lossy] == list(worst_operands(summary))
    assert len(details["surfaces"]) == 6
    x = torch.zeros(300, 1, 200)
    x[3, 0, 150] = -7.0
    file = Location(save(tmp_path / "x.pt", x))
    surface = view_surface(SurfacePlace(quant_type="bf16", site="fc2.y", layer=0, location=file))
    assert (surface.peak, surface.values.max(), surface.values.shape) == ((3, 150), 7.0, (96, 144))
    assert view_surface(SurfacePlace(quant_type="", site="", layer=0, location=Location(tmp_path / "none.pt"))) is None


def test_an_operand_of_another_dtype_does_not_end_a_run(tables, tmp_path):
    _, summary, _ = tables
    errors = [column for column in summary if column.endswith(".error_squares")]
    site = summary["site"] == "fc2.x"
    odd = summary.assign(amax=summary["amax"].where(~site, 1e6))
    assert surface_places(odd)[0].format == "mxfp8"
    odd = odd.assign(**{column: odd[column].where(~site) for column in errors})  # as of integers
    assert (surface_places(odd)[0].site, surface_places(odd)[0].format) == ("fc2.x", None)
    tensors = {
        "fp8": torch.eye(64).to(torch.float8_e4m3fn),
        "int": torch.eye(64).long(),
        "empty": torch.ones(4, 0),
        "sparse": torch.eye(64).to_sparse(),
    }
    found = {}
    for name, tensor in tensors.items():
        place = {"quant_type": "bf16", "site": "fc2.w", "layer": 0, "layer_type": "linear", "tensor_name": "weight"}
        file = Location(save(tmp_path / f"{name}.pt", tensor))
        found[name] = view_surface(SurfacePlace(**place, location=file, format="mxfp8"))
    assert found["empty"] is found["sparse"] is None
    assert all(found[name].quantised.rows == 64 and found[name].peak == (0, 0) for name in ("fp8", "int"))


def test_global_statistics_are_plain_json_and_add_up(capture, tables):
    index, summary, details = tables
    study = Study(
        source="x", index=index, summary=summary, commits=capture.commits, run_info=capture.run_info, **details
    )
    found = json.loads(json.dumps(global_statistics(study), allow_nan=False))
    of_type = found["types"]["mxfp8"]
    assert of_type["captured_rows"] == len(index)
    assert of_type["losses"] == {"0": pytest.approx(3.05)}
    for grouping in ("by_layer_type", "by_operation", "by_family", "by_site"):
        assert sum(entry["count"] for entry in of_type[grouping].values()) == of_type["total"]["count"]
    of_bf16 = of_type["total"]["formats"]["bf16"]
    assert of_bf16.pop("sqnr_db") is None
    assert of_bf16.pop("exact") is True
    assert not any(of_bf16.values())
