"""The page's numbers against the summary table, worked out again with numpy and pandas."""

import dataclasses
import json
import math

import numpy as np
import pandas
import pytest

from megatron.quantscope.analysis.findings import Finding
from megatron.quantscope.analysis.findings.finding import Place
from megatron.quantscope.analysis.scales import scale_exponents
from megatron.quantscope.report.html import data_comparison, encode
from megatron.quantscope.report.html.data import page_data
from megatron.quantscope.report.html.data_cells import cells_of
from megatron.quantscope.report.html.data_findings import link_of
from megatron.quantscope.report.html.data_formats import format_of
from tests.quantscope.analysis.captures import write_capture

RELATIVE = 10.0 ** (1 - encode.DIGITS)


@pytest.fixture(scope="module")
def wide(wide_study):
    return page_data(wide_study)


def keys_of(data):
    """(type, iteration, rank, site, layer) of every cell."""
    axes, cells = data["axes"], data["cells"]
    names = (("type", "types"), ("iteration", "iterations"), ("rank", "ranks"), ("site", "sites"))
    columns = [[axes[axis][place] for place in cells[name]] for name, axis in names]
    layers = [-1 if place < 0 else axes["layers"][place] for place in cells["layer"]]
    return list(zip(*columns, layers, strict=True))


def rows_of(study, key):
    """The rows of the summary table of a cell; None matches everything."""
    summary = study.summary
    mask = pandas.Series(True, index=summary.index)
    for column, value in zip(("quant_type", "iteration", "rank", "site"), key, strict=False):
        if value is not None:
            mask &= summary[column] == value
    return summary[mask & (summary["layer_idx"].fillna(-1) == key[4])]


def value_of(data, column, cell):
    return data["cells"]["values"][column][cell]


def test_it_is_json(wide):
    assert json.loads(encode.to_json(wide))["schema"] == 1


def test_cells_are_the_groups_of_the_summary(wide, wide_study):
    keys = keys_of(wide)
    assert len(set(keys)) == len(keys)
    assert sum(len(rows_of(wide_study, key)) for key in keys[::17]) == sum(
        wide["details"]["tensors"][cell] for cell in range(0, len(keys), 17)
    )
    assert wide["axes"]["ranks"] == [0, 1]
    assert wide["merged"] is None
    assert [len(column) for column in wide["cells"]["values"].values()] == [len(keys)] * len(wide["cells"]["values"])


@pytest.mark.parametrize("treatment", ["mxfp8", "mxfp4_rceil@2", "nvfp4@2", "fp8_e4m3", "hifp8", "hifp8_unscaled"])
def test_values_follow_from_sums(wide, wide_study, treatment):
    for cell, key in list(enumerate(keys_of(wide)))[::13]:
        rows = rows_of(wide_study, key)
        gradient = "gradient" in rows["family"].iloc[0]
        name = f"{treatment}_pow2" if treatment == "hifp8" and gradient else treatment.removesuffix("_unscaled")
        if rows[f"{name}.error_squares"].isna().any():
            assert value_of(wide, f"sqnr/{treatment}", cell) is None
            continue
        squares, errors = rows["sum_squares"].sum(), rows[f"{name}.error_squares"].sum()
        finite = rows["count"].sum() - rows["nan"].sum() - rows["inf"].sum()
        nonzero = finite - rows["zero"].sum()
        sqnr = 10 * math.log10(squares / errors) if errors else "exact"
        expected = {
            "sqnr": "lost" if rows[f"{name}.lost"].sum() else sqnr,
            "relative_error": None if rows[f"{name}.lost"].sum() else 100 * math.sqrt(errors / squares),
            "underflow": 100 * rows[f"{name}.underflow"].sum() / nonzero,
            "saturated": 100 * rows[f"{name}.saturated"].sum() / finite,
        }
        for metric, value in expected.items():
            assert value_of(wide, f"{metric}/{treatment}", cell) == pytest.approx(value, rel=RELATIVE), (metric, key)


def test_plain_values(wide, wide_study):
    for cell, key in list(enumerate(keys_of(wide)))[::29]:
        rows = rows_of(wide_study, key)
        finite = rows["count"].sum() - rows["nan"].sum() - rows["inf"].sum()
        rms = math.sqrt(rows["sum_squares"].sum() / finite)
        expected = {
            "amax": rows["amax"].max(),
            "rms": rms,
            "crest": math.log2(rows["amax"].max() / rms),
            "kurtosis": rows["kurtosis"].max(),
            "top_ratio": (rows["amax"] / rows["median_magnitude"]).max(),
            "nonfinite": rows["nan"].sum() + rows["inf"].sum(),
        }
        for metric, value in expected.items():
            assert value_of(wide, metric, cell) == pytest.approx(value, rel=RELATIVE), metric


@pytest.mark.parametrize(("treatment", "blocks"), [("nvfp4", 6), ("nvfp4@2", 48), ("mxfp4", 4), ("mxfp4@2", 48)])
def test_dead_blocks_are_a_share_of_the_blocks_of_this_format_along_this_gemm(study_of, tmp_path, treatment, blocks):
    """Two tokens of 48 channels hold anything: one large value, the others far below what a block keeps beside it."""

    def spoil(module, layer, name, tensor):
        if (module, layer, name) != ("mlp.linear_fc1", 0, "input"):
            return tensor
        tensor = 1e-6 * tensor
        tensor[2:] = 0
        tensor[0, 0, 0] = 1e4
        return tensor

    study = study_of(write_capture(tmp_path / "capture", "nvfp4", layers=1, spoil=spoil))
    data = page_data(study)
    cell = [key[3] for key in keys_of(data)].index("fc1.x")
    dead = study.summary.query("site == 'fc1.x'")[f"{treatment}.dead_blocks"].iloc[0]
    assert 0 < dead < blocks or treatment.startswith("mx")
    assert value_of(data, f"dead_blocks/{treatment}", cell) == pytest.approx(100 * dead / blocks, rel=RELATIVE)


def test_too_many_cells_are_put_together_exactly(wide_study):
    cells = cells_of(wide_study, most=1)
    assert cells.merged == ("rank", "iteration")
    assert cells.axes["ranks"] == cells.axes["iterations"] == [None]
    for (quant_type, site, layer), (cell,) in list(cells.places.items())[::11]:
        rows = rows_of(wide_study, (quant_type, None, None, site, layer))
        assert cells.groups["count"].iloc[cell] == rows["count"].sum()
        assert cells.groups["mxfp8.underflow"].iloc[cell] == rows["mxfp8.underflow"].sum()


def test_ranks_alone_are_put_together_where_that_is_enough(wide_study):
    whole = len(cells_of(wide_study))
    assert cells_of(wide_study, most=whole).merged == ()
    assert cells_of(wide_study, most=whole - 1).merged == ("rank",)


def test_the_page_says_what_was_put_together(wide_study, monkeypatch):
    monkeypatch.setattr("megatron.quantscope.report.html.data.cells_of", lambda study: cells_of(study, most=1))
    assert "ranks and iterations" in page_data(wide_study)["merged"]


def test_modules_outside_the_layers(small_study):
    summary = small_study.summary.copy()
    summary.loc[summary["layer_idx"] == 2, "layer_idx"] = None
    data = page_data(dataclasses.replace(small_study, summary=summary))
    assert data["axes"]["layers"] == [0, 1]
    assert {key[4] for key in keys_of(data)} == {-1, 0, 1}


def test_histograms_count_every_element_and_block(wide, wide_study):
    details = wide["details"]
    for cell, key in list(enumerate(keys_of(wide)))[::7]:
        rows = rows_of(wide_study, key)
        counted = details["n"][cell] - details["zero"][cell] - details["nan"][cell] - details["inf"][cell]
        assert sum(details["exponents"][cell]["counts"]) == counted
        for treatment, histogram in details["scales"][cell].items():
            rule, use = ("rceil" if "_rceil" in treatment else "floor"), int(treatment.endswith("@2"))
            expected = scale_exponents(rows, format_of(treatment).name, rule, use)
            assert (histogram["first"], histogram["counts"]) == (expected.first, expected.counts.tolist()), treatment


def test_scales_are_those_of_every_treatment_with_blocks(wide):
    cell = next(cell for cell, key in enumerate(keys_of(wide)) if key[3] == "fc1.x")
    formats = ("mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4")
    names = {f"{name}{rule}{use}" for name in formats for rule in ("", "_rceil") for use in ("", "@2")}
    assert set(wide["details"]["scales"][cell]) == names


def test_channels(wide, wide_study):
    details = wide["details"]
    for cell, key in list(enumerate(keys_of(wide)))[::31]:
        largest = np.max([np.asarray(row) for row in rows_of(wide_study, key)["channel_amax"]], axis=0)
        channels = details["channels"][cell]
        assert channels["width"] == len(largest)
        assert details["top_channels"][cell][0][0] == int(np.argmax(largest))
        if len(channels["values"]) == len(largest):
            found = 2.0 ** (np.array(channels["values"]) / channels["per_binade"])
            np.testing.assert_allclose(found, largest, rtol=2 ** (0.5 / channels["per_binade"]) - 1 + 1e-6)


def test_quantiles_only_where_they_are_of_one_tensor(wide, small_study):
    alone = page_data(small_study)
    assert len(alone["details"]["quantiles"][0]) == len(alone["normal_scores"])
    for tensors, quantiles in zip(wide["details"]["tensors"], wide["details"]["quantiles"], strict=True):
        assert (quantiles is None) == (tensors > 1)


TENSOR = Place(quant_type="bf16", site="fc2.x", layer=1, rank=1)
LINKS = [
    ("underflow", TENSOR, "underflow", "#/tensor/bf16/fc2.x/1?rank=1&format=mxfp4"),
    ("underflow", dataclasses.replace(TENSOR, rank=77), "sqnr", "#/tensor/bf16/fc2.x/1?format=mxfp4"),
    ("underflow", Place(quant_type="bf16"), "underflow", "#/heatmap?metric=underflow&format=mxfp4&type=bf16"),
    ("divergence", TENSOR, None, "#/compare?run=bf16"),
    ("loss", TENSOR, None, "#/"),
    ("note", Place(site="<&?/%>"), None, "#/"),
]


@pytest.mark.parametrize(("kind", "place", "metric", "expected"), LINKS)
def test_findings_are_linked_to_where_they_are_seen(wide_study, kind, place, metric, expected):
    finding = Finding(kind=kind, severity="note", title="t", text="x", place=place, metric=metric, format="mxfp4")
    assert link_of(finding, cells_of(wide_study)) == expected


def comparison_of(study, rows):
    columns = ("run", "baseline", "site", "layer_idx", "operation", "equal", "sqnr_db", "order")
    table = pandas.DataFrame(rows, columns=columns)
    filled = {"iteration": 0, "micro_batch": 0, "rank": 0, "cosine": 1.0, "relative_l2": 0.0, "max_error": 0.0}
    return dataclasses.replace(study, comparison=table.assign(family="activation", **filled))


def test_the_comparison(small_study):
    rows = [
        ("mxfp8", "bf16", "qkv.y", 0, "forward", True, math.inf, 0),
        ("mxfp8", "bf16", "fc2.y", 0, "forward", False, 18.5, 1),
        ("mxfp8", "bf16", "output_layer.y", None, "forward", False, -math.inf, 2),
    ]
    found = data_comparison.comparison(comparison_of(small_study, rows))
    assert found["baseline"] == "bf16"
    assert found["columns"]["sqnr_db"] == ["exact", 18.5, "lost"]
    assert found["columns"]["layer"] == [0, 0, -1]
    assert found["columns"]["equal"] == [True, False, False]
    assert found["parting"][0]["site"] == "fc2.y"
    assert found["left_out"] is None


def test_a_comparison_that_is_too_large_says_what_it_leaves_out(small_study, monkeypatch):
    monkeypatch.setattr(data_comparison, "MOST_ROWS", 1)
    study = comparison_of(small_study, [("mxfp8", "bf16", "fc2.y", 0, "forward", False, 18.5, 1)] * 2)
    study.comparison["rank"] = [0, 1]
    found = data_comparison.comparison(study)
    assert len(found["columns"]["run"]) == 1
    assert "rank 0" in found["left_out"]


def test_without_losses_findings_and_comparison(small_study):
    data = page_data(dataclasses.replace(small_study, commits={}, run_info={}, findings=[], comparison=None))
    assert (data["losses"], data["findings"], data["comparison"]) == (None, [], None)
    assert data["runs"][0]["command"] is None
