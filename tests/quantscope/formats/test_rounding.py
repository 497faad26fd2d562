"""Elements without a scale: golden vectors, pinned libraries, and every 16-bit input against the reference."""

import math

import en_dtypes
import ml_dtypes
import numpy as np
import pytest
import torch

from megatron.quantscope.formats import FORMATS, catalog, fake_quantize
from megatron.quantscope.formats.reference import element_grid

ELEMENTS = [catalog.E4M3, catalog.E5M2, catalog.E2M3, catalog.E3M2, catalog.E2M1]
UNSCALED = [*ELEMENTS, FORMATS["hifp8"], FORMATS["bf16"], FORMATS["fp16"]]
BACKENDS = ("torch", "reference")
OVERFLOWS = [
    (fmt, saturate)
    for fmt in UNSCALED
    for saturate in (None, True, False)
    if saturate is not False or fmt.has_inf or fmt.has_nan
]
by_name = pytest.mark.parametrize("fmt", UNSCALED, ids=lambda fmt: fmt.name)
by_element = pytest.mark.parametrize("fmt", ELEMENTS, ids=lambda fmt: fmt.name)
by_backend = pytest.mark.parametrize("backend", BACKENDS)
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}


@by_backend
@by_element
def test_elements_are_golden(fmt, backend, golden, assert_same_bits):
    arrays = golden(f"elem_{fmt.name}")
    assert_same_bits(fake_quantize(torch.from_numpy(arrays["x"]), fmt, backend=backend), arrays["y_sat"])


@by_backend
def test_hif8_is_golden(backend, golden, assert_same_bits):
    arrays = golden("hif8_round")
    assert_same_bits(fake_quantize(torch.from_numpy(arrays["x"]), "hifp8", backend=backend), arrays["y"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("fmt", "saturate"), OVERFLOWS, ids=lambda value: getattr(value, "name", str(value)))
def test_every_16_bit_input_agrees_with_the_reference(fmt, saturate, dtype, every_pattern, assert_same_bits):
    x = every_pattern(dtype)
    fast, slow = (fake_quantize(x, fmt, saturate=saturate, backend=backend) for backend in BACKENDS)
    assert_same_bits(fast, slow)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@by_name
def test_values_and_midpoints_agree_with_the_reference(fmt, dtype, assert_same_bits):
    """Every value of the format, every tie, and the neighbours of both in the input's dtype."""
    grid = torch.tensor(element_grid(fmt), dtype=torch.float64)
    beyond = torch.tensor(
        [fmt.max * factor for factor in (1.03125, 1.0625, 1.125, 1.25, 1.5, 2.0)], dtype=torch.float64
    )
    if fmt.name == "bf16":
        beyond = beyond[:1]  # the others are no float32
    x = torch.cat([grid, (grid[:-1] + grid[1:]) / 2, beyond]).to(dtype)
    x = torch.cat([x, x.nextafter(torch.full_like(x, math.inf)), x.nextafter(torch.full_like(x, -math.inf))])
    x = torch.cat([x, -x])
    assert_same_bits(fake_quantize(x, fmt), fake_quantize(x, fmt, backend="reference"))


@pytest.mark.parametrize("name", list(ML_DTYPES))
def test_in_range_is_the_cast_of_ml_dtypes(name, assert_same_bits):
    fmt = next(fmt for fmt in UNSCALED if fmt.name == name)
    numbers = np.random.default_rng(0)
    x = (numbers.standard_normal(50_000) * 2.0 ** numbers.integers(fmt.emin - 8, fmt.emax, 50_000)).astype(np.float32)
    x = x[np.abs(x) <= fmt.max]
    assert_same_bits(fake_quantize(torch.from_numpy(x), fmt), x.astype(ML_DTYPES[name]).astype(np.float32))


def test_hif8_is_the_cast_of_en_dtypes(assert_same_bits):
    """On one float32 of every 4,099 (a prime), all magnitudes and signs, NaN and Inf among them."""
    x = np.arange(0, 1 << 32, 4099, dtype=np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = x.astype(en_dtypes.hifloat8).astype(np.float32)
    assert_same_bits(fake_quantize(torch.from_numpy(x), "hifp8"), expected)


@pytest.mark.parametrize(
    ("name", "x", "default", "saturated", "unsaturated"),
    [
        ("hifp8", 40959.0, 32768.0, 32768.0, 32768.0),
        ("hifp8", 40960.0, math.inf, 32768.0, math.inf),
        ("hifp8", -math.inf, -math.inf, -32768.0, -math.inf),
        ("fp16", 65519.0, 65504.0, 65504.0, 65504.0),
        ("fp16", 65520.0, math.inf, 65504.0, math.inf),
        ("bf16", 3.4e38, math.inf, FORMATS["bf16"].max, math.inf),
    ],
)
def test_overflow_is_what_saturate_says(name, x, default, saturated, unsaturated):
    results = [fake_quantize(torch.tensor([x]), name, saturate=saturate).item() for saturate in (None, True, False)]
    assert results == [default, saturated, unsaturated]


def test_overflow_without_saturation_is_inf_or_else_nan():
    x = torch.tensor([464.0, 464.001, -math.inf, 1.0])
    torch.testing.assert_close(
        fake_quantize(x, catalog.E4M3, saturate=False), torch.tensor([448.0, math.nan, math.nan, 1.0]), equal_nan=True
    )
    x = torch.tensor([61439.0, -61440.0, math.inf, 1.0])
    assert fake_quantize(x, catalog.E5M2, saturate=False).tolist() == [57344.0, -math.inf, math.inf, 1.0]


@by_name
def test_zero_keeps_its_sign_where_the_format_has_one(fmt):
    tiny = fmt.min_subnormal / 8 if fmt.name != "bf16" else 0.0
    zeros = fake_quantize(torch.tensor([0.0, -0.0, tiny, -tiny]), fmt)
    assert zeros.tolist() == [0.0] * 4
    assert torch.signbit(zeros).tolist() == [False, fmt.has_negative_zero] * 2


@by_name
def test_nan_stays_nan_of_either_sign(fmt):
    x = torch.tensor([0x7FC00000, -0x00400000, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert torch.isnan(fake_quantize(x, fmt)).all()


@by_name
def test_quantising_twice_changes_nothing(fmt, every_pattern, assert_same_bits):
    once = fake_quantize(every_pattern(torch.bfloat16).float(), fmt)
    assert_same_bits(fake_quantize(once, fmt), once)
