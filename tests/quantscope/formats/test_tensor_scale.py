"""Formats with a scale for the whole tensor: nvfp4 and per-tensor fp8."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron.quantscope.formats import FORMATS, fake_quantize

FP8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
by_fp8 = pytest.mark.parametrize("name", FP8)
by_name = pytest.mark.parametrize("name", [*FP8, "nvfp4"])
by_backend = pytest.mark.parametrize("backend", ["torch", "reference"])


def per_tensor_fp8(x: np.ndarray, name: str, amax: np.float32 | None = None) -> np.ndarray:
    """The rule in numpy float32, rounded to the element by ml_dtypes."""
    largest, float32 = np.float32(FORMATS[name].max), np.float32
    amax = np.abs(x).max() if amax is None else amax
    with np.errstate(over="ignore"):
        scale = min(largest / amax, np.finfo(float32).max) if amax > 0 and np.isfinite(amax) else float32(1)
    scaled = np.clip(x * float32(scale), -largest, largest)
    return scaled.astype(FP8[name]).astype(float32) * (float32(1) / float32(scale))


@by_backend
def test_nvfp4_is_golden(backend, golden, assert_same_bits):
    vectors = golden("nvfp4_block16")
    tensors = len(vectors["x"]) if backend == "torch" else 3
    for x, y in zip(vectors["x"][:tensors], vectors["y"][:tensors], strict=True):
        assert_same_bits(fake_quantize(torch.from_numpy(x), "nvfp4", backend=backend), y)
        assert_same_bits(fake_quantize(torch.from_numpy(x.T), "nvfp4", axis=0, backend=backend).t(), y)


@by_backend
@by_fp8
@pytest.mark.parametrize("magnitude", [1.0, 1e-4, 3e7, 1e-36, 1e-42, 5e37])
def test_fp8_is_numpy_with_ml_dtypes(name, magnitude, backend, assert_same_bits):
    x = (np.random.default_rng(5).standard_normal((64, 96)) * magnitude).astype(np.float32)
    x[0, :4] = [0.0, -0.0, magnitude * 1e-9, -magnitude * 1e-9]
    assert_same_bits(fake_quantize(torch.from_numpy(x), name, backend=backend), per_tensor_fp8(x, name))


@by_fp8
def test_fp8_of_a_bf16_tensor_is_rounded_to_bf16_once(name, assert_same_bits):
    x = torch.randn(50, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert_same_bits(fake_quantize(x, name), torch.from_numpy(per_tensor_fp8(x.float().numpy(), name)).bfloat16())


@by_name
def test_largest_magnitude_survives(name):
    x = torch.tensor([[3.7, -0.2] * 16])
    assert fake_quantize(x, name)[0, 0].item() == pytest.approx(3.7, rel=1e-6)


@by_name
def test_shards_with_the_amax_of_the_whole_are_the_whole(name, assert_same_bits):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    x[7, 63] = 30.0
    whole = fake_quantize(x, name)
    shards = [fake_quantize(shard, name, amax=x.abs().max()) for shard in x.split(2)]
    assert_same_bits(torch.cat(shards), whole)
    assert not torch.equal(fake_quantize(x[:2], name), whole[:2])


@by_name
@by_backend
def test_zero_tensor_stays_zero(name, backend):
    y = fake_quantize(torch.tensor([0.0, -0.0] * 16), name, backend=backend)
    assert torch.signbit(y).tolist() == [False, True] * 16
    assert (y == 0).all()


@by_fp8
@by_backend
def test_nan_and_inf_do_not_spread(name, backend):
    """The scale is 1 then: NaN stays, Inf saturates, and the others are the plain element."""
    y = fake_quantize(torch.tensor([math.nan, math.inf, -math.inf, 1.0, 1e6]), name, backend=backend)
    largest = FORMATS[name].max
    assert math.isnan(y[0])
    assert y[1:].tolist() == [largest, -largest, 1.0, largest]


@by_backend
def test_nvfp4_block_with_nan_or_inf_is_nan(backend):
    x = torch.ones(4, 16)
    x[1, 3], x[2, 5] = math.nan, math.inf
    assert torch.isnan(fake_quantize(x, "nvfp4", backend=backend)).all(dim=1).tolist() == [False, True, True, False]
    assert torch.isnan(fake_quantize(x, "nvfp4", backend=backend)).any(dim=1).tolist() == [False, True, True, False]
