"""Quantising each value once, weighted by its count, gives what quantising the tensor gives."""

import pytest
import torch

from megatron.quantscope.analysis.elementwise import element_errors, weighted_values
from megatron.quantscope.analysis.format_errors import Treatment, pow2_scale, treatments
from megatron.quantscope.formats import FORMATS, fake_quantize
from megatron.quantscope.formats.scales import as_float32, largest_magnitude
from megatron.quantscope.gemm.operands import LinearQuant
from megatron.quantscope.gemm.operands import pow2_scale as scale_of_training
from tests.quantscope.analysis.conftest import numpy_error

UNBLOCKED = [one for one in treatments() if one.format.block is None]


def amax_of(x):
    return float(x[torch.isfinite(x)].abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("treatment", [one for one in UNBLOCKED if not one.scaled], ids=lambda one: one.name)
def test_errors_equal_those_of_quantising(rough, dtype, treatment):
    x = rough.clamp(-60000, 60000).to(dtype)
    found = element_errors(weighted_values(x), amax_of(x), [treatment])[treatment.name]
    squares, underflow, lost = numpy_error(x, fake_quantize(as_float32(x), treatment.format))
    assert found.error_squares == pytest.approx(squares, rel=1e-12)
    assert (found.underflow, found.lost) == (underflow, lost)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["fp16", "hifp8"])
def test_scaled_treatments_are_those_of_a_gradient_in_training(dtype, name):
    """Against the very function that the quantised GEMMs call for dy."""
    dy = (torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * 1e-5).to(dtype)
    gemms = {gemm: dict.fromkeys(operands, name) for gemm, operands in LinearQuant.GEMMS.items()}
    quant = LinearQuant(gemms=gemms, grad_scale="pow2-amax")
    expected = quant.quantize(dy, "dgrad", "dy", axis=1)
    treatment = Treatment(name="scaled", format=FORMATS[name], scaled=True)
    found = element_errors(weighted_values(dy), amax_of(dy), [treatment])["scaled"]
    if dtype == torch.float16 and name == "fp16":  # nothing to do, there and here
        assert found.error_squares == 0 == numpy_error(dy, expected)[0]
        return
    squares, underflow, lost = numpy_error(dy, expected)
    # training rounds the result to fp16 where that is the dtype; the values are the same for bf16 and float32
    assert found.error_squares == pytest.approx(squares, rel=1e-12 if dtype != torch.float16 else 0.05)
    assert (found.underflow, found.lost) == (underflow, lost)


@pytest.mark.parametrize("amax", [1e-30, 3.1e-6, 0.75, 15.0, 15.1, 22400.0, 0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["fp16", "hifp8"])
def test_scale_is_that_of_training(amax, name):
    limit = FORMATS[name].full_precision_max
    assert pow2_scale(amax, limit) == float(scale_of_training(largest_magnitude(torch.tensor([amax])), limit))


def test_overflow_is_lost_and_what_is_clipped_is_saturated():
    x = torch.tensor([1.0, 40000.0, 45000.0, 60000.0, 70000.0, -1e5], dtype=torch.float32)
    found = element_errors(weighted_values(x), 1e5, UNBLOCKED)
    assert found["fp16"].lost == 2
    assert (found["hifp8"].saturated, found["hifp8"].lost) == (1, 4)  # 40000 rounds to 2^15, from 40960 on: Inf
    assert found["fp8_e4m3"].saturated == found["fp8_e4m3"].lost == 0  # its scale puts amax onto max
    assert found["bf16"].lost == 0


def test_values_are_ascending_distinct_and_all_there(rough):
    x = torch.cat([rough.bfloat16().flatten(), torch.tensor([float("nan"), float("inf"), -0.0], dtype=torch.bfloat16)])
    (batch,) = weighted_values(x)
    values = batch.values.double()
    assert (values[1:] >= values[:-1]).all()
    assert batch.counts.sum() == len(x) - 2
    distinct, counts = torch.unique(x[torch.isfinite(x)].view(torch.int16), return_counts=True)
    assert len(batch.values) == len(distinct)
    assert sorted(batch.counts.tolist()) == sorted(counts.tolist())


def test_empty_tensor():
    found = element_errors(weighted_values(torch.empty(0, dtype=torch.bfloat16)), 0.0, UNBLOCKED)
    assert all(error.error_squares == 0 and error.lost == 0 for error in found.values())
