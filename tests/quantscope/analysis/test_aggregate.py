"""Merged rows equal what the concatenated tensors would give."""

import numpy as np
import pandas as pd
import pytest
import torch

from megatron.quantscope.analysis.aggregate import (
    as_trained,
    channels_by_layer,
    depths_of,
    exponent_image,
    exponents_of,
    largest_by_layer,
    layer_matrix,
    merged,
    treatments_of,
)
from megatron.quantscope.analysis.format_errors import treatments
from megatron.quantscope.analysis.roles import role_of
from megatron.quantscope.analysis.summary import summarize
from megatron.quantscope.analysis.tables import summary_row
from megatron.quantscope.capture import TensorRecord
from megatron.quantscope.formats import FORMATS, fake_quantize
from tests.quantscope.analysis.conftest import numpy_error

TRIED = treatments()


def row_of(tensor, layer=0, name="input", path="/a"):
    record = TensorRecord(
        path=path, bytes=1, layer_type="linear", operation="forward", quant_type="bf16", tensor_name=name,
        layer_idx=layer, module=f"decoder.layers.{layer}.mlp.linear_fc1",
    )  # fmt: skip
    return summary_row(record, summarize(tensor, role_of("linear", name), treatments=TRIED))


@pytest.fixture
def parts():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 64, generator=generator) * 10.0**power).bfloat16() for power in (-3, 0, 2)]


def test_merging_is_exact(parts):
    groups = merged(pd.DataFrame([row_of(part) for part in parts]), "site")
    row, whole = groups.loc["fc1.x"], torch.cat(parts)
    assert (row["count"], row["rows"]) == (whole.numel(), 3)
    assert row["amax"] == whole.abs().max().item()
    assert row["rms"] == pytest.approx(whole.double().square().mean().sqrt().item(), rel=1e-12)
    for fmt in (FORMATS["mxfp8"], FORMATS["mxfp4"], FORMATS["hifp8"]):
        squares, underflow, _ = numpy_error(whole, fake_quantize(whole, fmt))
        expected = 10 * np.log10(np.square(whole.double().numpy()).sum() / squares)
        assert row[f"{fmt.name}.sqnr_db"] == pytest.approx(expected, rel=1e-9)
        assert row[f"{fmt.name}.relative_error"] == pytest.approx(10 ** (-expected / 20), rel=1e-9)
        assert row[f"{fmt.name}.underflow_percent"] == pytest.approx(100 * underflow / int((whole != 0).sum()))


def test_histograms_add_up(parts):
    frame = pd.DataFrame([row_of(part) for part in parts])
    whole = torch.cat(parts)
    assert exponents_of(frame).total == int((whole != 0).sum()) == depths_of(frame).sum()
    exponents = np.frexp(whole.double().numpy()[(whole != 0).numpy()])
    assert exponents_of(frame).counts.tolist() == np.bincount(exponents[1] - 1 - exponents_of(frame).first).tolist()


def test_lost_elements_make_the_group_lost():
    frame = pd.DataFrame([row_of(torch.tensor([[1.0, 70000.0]]).bfloat16()), row_of(torch.ones(4, 4).bfloat16())])
    row = merged(frame, "site").loc["fc1.x"]
    assert row["fp16.sqnr_db"] == -np.inf
    assert row["fp16.lost_percent"] == pytest.approx(100 / 18)
    assert row["bf16.sqnr_db"] == np.inf
    assert np.isnan(merged(pd.DataFrame([row_of(torch.zeros(4))]), "site").loc["fc1.x", "mxfp8.sqnr_db"])


def test_gradients_take_the_scaled_treatment_and_nothing_else_does():
    small = (torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) * 1e-7).bfloat16()
    frame = pd.DataFrame([row_of(small, name="grad_output"), row_of(small, name="input")])
    trained = as_trained(frame)
    assert set(treatments_of(trained)) == {one.name for one in TRIED if not one.scaled}
    assert trained["fp16.dead_blocks"].tolist() == [frame["fp16_pow2.dead_blocks"][0], frame["fp16.dead_blocks"][1]]
    assert trained["mxfp4_rceil@2.sqnr_db"].equals(frame["mxfp4_rceil@2.sqnr_db"])
    restricted = frame[[column for column in frame if not column.startswith(("hifp8", "fp16"))]]
    assert list(as_trained(restricted)) == list(restricted)
    assert trained["hifp8.underflow"].tolist() == [frame["hifp8_pow2.underflow"][0], frame["hifp8.underflow"][1]]
    assert trained["hifp8.sqnr_db"][0] > 25 > trained["hifp8.sqnr_db"][1]
    assert "hifp8_pow2.sqnr_db" in frame  # the table itself is left as it was


def test_matrix_has_sites_in_order_and_gaps_as_nan(parts):
    rows = [row_of(parts[0], 0), row_of(parts[1], 2), row_of(parts[2], 2, "weight"), row_of(parts[2], None, "output")]
    sites, layers, values = layer_matrix(merged(pd.DataFrame(rows), ["site", "layer_idx"]), "amax")
    assert (sites, layers) == (["fc1.x", "fc1.w", "fc1.y"], [0, 2])
    assert values[0].tolist() == [parts[0].abs().max().item(), parts[1].abs().max().item()]
    assert np.isnan(values[1, 0])
    assert np.isnan(values[2]).all()


def test_largest_magnitudes_are_those_of_one_tensor(parts):
    layers, tops = largest_by_layer(pd.DataFrame([row_of(parts[0], 5), row_of(parts[2], 5), row_of(parts[1], 7)]))
    assert layers == [5, 7]
    np.testing.assert_array_equal(tops[0], parts[2].abs().double().flatten().sort(descending=True).values[:3])


def test_images_hold_percentages_and_channel_maxima(parts):
    frame = pd.DataFrame([row_of(parts[1], 1), row_of(parts[2], 4)])
    layers, image = exponent_image(frame, range(-200, 200))
    assert layers == [1, 4]
    np.testing.assert_allclose(np.nansum(image, axis=0), [100 * (part != 0).double().mean() for part in parts[1:]])
    layers, channels, maxima = channels_by_layer(frame, tiles=16)
    assert (channels, maxima.shape) == (64, (2, 16))
    assert maxima[1].max() == parts[2].abs().max().item()


def test_a_second_use_is_that_of_the_tensors_that_have_one(parts):
    """An output goes into no GEMM: where it is merged with an input, `@2` is the input's alone."""
    x, y = row_of(parts[0]), row_of(parts[2], name="output")
    frame = pd.DataFrame([x, y]).assign(all=0)
    both, alone = merged(frame, "all").loc[0], merged(frame[:1], "all").loc[0]
    for figure in (
        "sqnr_db",
        "relative_error",
        "underflow_percent",
        "saturated_percent",
        "error_squares",
        "dead_blocks",
    ):
        assert both[f"mxfp4@2.{figure}"] == alone[f"mxfp4@2.{figure}"]
    assert both["mxfp4.error_squares"] == x["mxfp4.error_squares"] + y["mxfp4.error_squares"]
    assert np.isnan(merged(frame[1:], "all").loc[0, "mxfp4@2.sqnr_db"])
    assert (both["blocks"], both["zero_blocks"]) == (64, 0)


def test_blocks_and_dead_blocks_add_up():
    x = torch.zeros(4, 64)
    x[1, :32], x[2, 40] = 1.0, 2.0**-30  # beyond hifp8 and fp16
    row = merged(pd.DataFrame([row_of(x.bfloat16()), row_of(x.bfloat16(), layer=1)]), "site").loc["fc1.x"]
    assert (row["blocks"], row["zero_blocks"]) == (16, 12)
    assert (row["hifp8.dead_blocks"], row["fp16.dead_blocks"], row["mxfp4.dead_blocks"]) == (2, 2, 0)
