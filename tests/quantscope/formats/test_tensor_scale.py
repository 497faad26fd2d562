"""Formats with a scale for the whole tensor: nvfp4 and per-tensor fp8."""

import math
from pathlib import Path

import hypothesis
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import strategies

from megatron.quantscope.formats import FORMATS, dequantize, fake_quantize, quantize
from tests.golden import make_fp8
from tests.quantscope.formats.any_bits import DTYPES, any_rows

FP8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
by_fp8 = pytest.mark.parametrize("name", FP8)
by_name = pytest.mark.parametrize("name", [*FP8, "nvfp4"])
VECTORS = Path(make_fp8.__file__).parent  # the whole golden set beside the repository has no such file


def per_tensor_fp8(x: np.ndarray, name: str, amax: np.float32 | None = None) -> np.ndarray:
    """The rule in numpy float32, rounded to the element by ml_dtypes."""
    largest, float32 = np.float32(FORMATS[name].max), np.float32
    amax = np.abs(x).max() if amax is None else amax
    with np.errstate(over="ignore"):
        scale = min(largest / amax, np.finfo(float32).max) if amax > 0 and np.isfinite(amax) else float32(1)
    scaled = np.clip(x * float32(scale), -largest, largest)
    return scaled.astype(FP8[name]).astype(float32) * (float32(1) / float32(scale))


def test_nvfp4_is_golden(backend, golden, assert_same_bits):
    vectors = golden("nvfp4_block16")
    tensors = len(vectors["x"]) if backend == "torch" else 3
    for x, y in zip(vectors["x"][:tensors], vectors["y"][:tensors], strict=True):
        assert_same_bits(fake_quantize(torch.from_numpy(x), "nvfp4", backend=backend), y)
        assert_same_bits(fake_quantize(torch.from_numpy(x.T), "nvfp4", axis=0, backend=backend).t(), y)


def fp8_vectors(name: str) -> dict[str, np.ndarray]:
    with np.load(VECTORS / f"{name}_tensor.npz") as arrays:
        return dict(arrays)


@by_fp8
def test_fp8_is_golden(name, backend, assert_same_bits):
    vectors = fp8_vectors(name)
    assert len(vectors["kind_names"]) == 17
    for x, y in zip(vectors["x"], vectors["y"], strict=True):
        assert_same_bits(fake_quantize(torch.from_numpy(x), name, backend=backend), y)
        square = torch.from_numpy(x).view(32, 32).t()
        assert_same_bits(fake_quantize(square, name, backend=backend).t().flatten(), y)


@by_fp8
def test_fp8_of_16_bit_tensors_is_golden_and_rounded_once_more(name, backend, assert_same_bits):
    vectors = fp8_vectors(name)
    found = 0
    for x, y in zip(vectors["x"], vectors["y"], strict=True):
        for dtype in (torch.bfloat16, torch.float16):
            narrow = torch.from_numpy(x).to(dtype)
            if torch.equal(narrow.float().nan_to_num(), torch.from_numpy(x).nan_to_num()):
                assert_same_bits(fake_quantize(narrow, name, backend=backend), torch.from_numpy(y).to(dtype))
                found += 1
    assert found >= 3


@by_fp8
def test_fp8_codes_and_scales_are_golden(name, backend):
    """A stored scale is what values are multiplied with: one over the scale of the rule."""
    if backend == "reference":
        pytest.skip("the reference makes no codes")
    vectors = fp8_vectors(name)
    for x, scale, code in zip(vectors["x"], vectors["scale"], vectors["code"], strict=True):
        stored = quantize(torch.from_numpy(x), name, backend=backend)
        is_number = ~np.isnan(x)
        np.testing.assert_array_equal(stored.codes.numpy()[is_number], code[is_number])
        assert (
            torch.isnan(dequantize(stored.codes, name, scales=stored.scales)).numpy().tolist() == np.isnan(x).tolist()
        )
        assert stored.scales.item() == np.float32(1) / scale


@by_fp8
def test_fp8_vectors_are_what_their_generator_makes(name):
    """And they agree in themselves: y is the value of the code, divided by the scale."""
    vectors, element = fp8_vectors(name), make_fp8.ELEMENTS[name]
    values = np.array([float(value) for value in element.values()], dtype=np.float32)
    for x, y, scale, code in zip(*(vectors[key] for key in ("x", "y", "scale", "code")), strict=True):
        made = make_fp8.quantized(x, element)
        np.testing.assert_array_equal(made[0].view(np.uint32), y.view(np.uint32))
        assert made[1] == scale
        np.testing.assert_array_equal(made[2], code)
        finite = ~np.isnan(x)
        decoded = values[code[finite] & 0x7F] * (np.float32(1) / scale)
        np.testing.assert_array_equal(np.where(code[finite] >> 7, -decoded, decoded), y[finite])
        assert (code[~finite] == make_fp8.NAN_CODE).all()


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
def test_largest_magnitude_survives(name, backend):
    x = torch.tensor([[3.7, -0.2] * 16])
    assert fake_quantize(x, name, backend=backend)[0, 0].item() == pytest.approx(3.7, rel=1e-6)


@by_name
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shards_with_the_amax_of_the_whole_are_the_whole(name, dtype, backend, assert_same_bits):
    x = torch.randn(8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[7, 63] = 30.0 + 2.0**-30  # whether it is narrowed to the nearest float32 or by rounding to odd would show
    whole = fake_quantize(x, name, backend=backend)
    shards = [fake_quantize(shard, name, amax=x.abs().max(), backend=backend) for shard in x.split(2)]
    assert_same_bits(torch.cat(shards), whole)
    assert not torch.equal(fake_quantize(x[:2], name, backend=backend), whole[:2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@hypothesis.settings(
    max_examples=100, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(
    data=strategies.data(),
    name=strategies.sampled_from([*FP8, "nvfp4"]),
    amax=strategies.none() | strategies.floats(min_value=0.0, width=32) | strategies.just(math.nan),
    axis=strategies.sampled_from([0, 1]),
)
def test_any_bits_with_any_amax_agree_with_the_reference(data, dtype, name, amax, axis, backend, assert_same_bits):
    """The amax given may also be too small (what exceeds it saturates), 0, Inf or NaN (the scale is 1)."""
    if backend == "reference":
        pytest.skip("the reference is what the others are held against")
    x = data.draw(any_rows(dtype))
    given = None if amax is None else torch.tensor(amax)
    results = [fake_quantize(x, name, axis=axis, amax=given, backend=which) for which in (backend, "reference")]
    assert_same_bits(*results)


@by_name
def test_zero_tensor_stays_zero(name, backend):
    y = fake_quantize(torch.tensor([0.0, -0.0] * 16), name, backend=backend)
    assert torch.signbit(y).tolist() == [False, True] * 16
    assert (y == 0).all()


@by_fp8
def test_nan_and_inf_do_not_spread(name, backend):
    """The scale is 1 then: NaN stays, Inf saturates, and the others are the plain element."""
    y = fake_quantize(torch.tensor([math.nan, math.inf, -math.inf, 1.0, 1e6]), name, backend=backend)
    largest = FORMATS[name].max
    assert math.isnan(y[0])
    assert y[1:].tolist() == [largest, -largest, 1.0, largest]


def test_nvfp4_block_with_nan_or_inf_is_nan(backend):
    x = torch.ones(4, 16)
    x[1, 3], x[2, 5] = math.nan, math.inf
    assert torch.isnan(fake_quantize(x, "nvfp4", backend=backend)).all(dim=1).tolist() == [False, True, True, False]
    assert torch.isnan(fake_quantize(x, "nvfp4", backend=backend)).any(dim=1).tolist() == [False, True, True, False]
