import math

import pytest
import torch

from megatron.quantscope.analysis.format_errors import FormatError, Treatment, as_scaled, pow2_scale, treatments
from megatron.quantscope.formats import FORMATS, measure
from megatron.quantscope.formats.scales import largest_magnitude
from megatron.quantscope.gemm.operands import pow2_scale as scale_of_training


def test_sqnr_is_defined_for_every_case():
    assert FormatError(error_squares=1.0).sqnr_db(1000.0) == pytest.approx(30.0)
    assert FormatError().sqnr_db(5.0) == math.inf
    assert FormatError(lost=1).sqnr_db(5.0) == -math.inf
    assert math.isnan(FormatError().sqnr_db(0.0))


def test_records_add_up():
    total = FormatError(error_squares=1.0, underflow=2) + FormatError(
        error_squares=0.5, saturated=3, lost=4, dead_blocks=5
    )
    assert total == FormatError(error_squares=1.5, underflow=2, saturated=3, lost=4, dead_blocks=5)


def test_every_format_rule_and_use_is_tried():
    names = [one.name for one in treatments()]
    assert len(set(names)) == len(names)
    assert set(FORMATS) < set(names)
    of_mx = [name for name in names if name.startswith("mxfp8") and "e5m2" not in name]
    assert of_mx == ["mxfp8", "mxfp8_rceil", "mxfp8@2", "mxfp8_rceil@2"]
    assert [name for name in names if name.startswith("nvfp4")] == ["nvfp4", "nvfp4@2"]
    assert [name for name in names if name.startswith("hifp8")] == ["hifp8", "hifp8_pow2"]
    assert len(names) == 5 * 4 + 2 + 5 + 2


def test_formats_restrict_and_those_of_the_capture_stay():
    assert {one.format for one in treatments(formats=["mxfp4", "mxfp8_e4m3"])} == {"mxfp4", "mxfp8"}
    assert {one.format for one in treatments(["bf16", "nvfp4", "something else"], formats=["mxfp4"])} == {
        "bf16", "nvfp4", "mxfp4",
    }  # fmt: skip
    assert treatments(["mxfp4"]) == treatments()
    assert treatments(formats=[]) == ()
    with pytest.raises(ValueError, match="unknown number format 'fp3'"):
        treatments(formats=["fp3"])


def test_names_and_treatments_are_one_to_one():
    for one in treatments():
        assert Treatment.named(one.name) == one
        assert one.record is FORMATS[one.format]
    with pytest.raises(ValueError, match="unknown treatment 'mxfp8@3'"):
        Treatment.named("mxfp8@3")


@pytest.mark.parametrize("amax", [1e-30, 3.1e-6, 0.75, 15.0, 15.1, 22400.0, 0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["fp16", "hifp8"])
def test_scale_is_that_of_training(amax, name):
    limit = FORMATS[name].full_precision_max
    assert pow2_scale(amax, limit) == float(scale_of_training(largest_magnitude(torch.tensor([amax])), limit))


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_tensor_with_an_element_that_is_not_finite_is_not_scaled(odd):
    x = torch.tensor([1e-6, odd])
    scaled, scale = as_scaled(x, Treatment.named("hifp8_pow2"), measure(x))
    assert scale == 1.0
    assert scaled is x
