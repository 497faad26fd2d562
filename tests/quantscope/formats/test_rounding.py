"""Elements without a scale: golden vectors, and every 16-bit input against the reference."""

import math

import pytest
import torch

from megatron.quantscope.formats import FORMATS, catalog, fake_quantize
from megatron.quantscope.formats.reference import element_grid

ELEMENTS = [catalog.E4M3, catalog.E5M2, catalog.E2M3, catalog.E3M2, catalog.E2M1]
UNSCALED = [*ELEMENTS, FORMATS["hifp8"], FORMATS["bf16"], FORMATS["fp16"]]
OVERFLOWS = [
    (fmt, saturate)
    for fmt in UNSCALED
    for saturate in (None, True, False)
    if saturate is not False or fmt.has_inf or fmt.has_nan
]
by_name = pytest.mark.parametrize("fmt", UNSCALED, ids=lambda fmt: fmt.name)
by_element = pytest.mark.parametrize("fmt", ELEMENTS, ids=lambda fmt: fmt.name)


@by_element
def test_elements_are_golden(fmt, backend, golden, assert_same_bits):
    arrays = golden(f"elem_{fmt.name}")
    assert_same_bits(fake_quantize(torch.from_numpy(arrays["x"]), fmt, backend=backend), arrays["y_sat"])


def test_hif8_is_golden(backend, golden, assert_same_bits):
    arrays = golden("hif8_round")
    assert_same_bits(fake_quantize(torch.from_numpy(arrays["x"]), "hifp8", backend=backend), arrays["y"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("fmt", "saturate"), OVERFLOWS, ids=lambda value: getattr(value, "name", str(value)))
def test_every_16_bit_input_agrees_with_the_reference(fmt, saturate, dtype, backend, every_pattern, assert_same_bits):
    x = every_pattern(dtype)
    fast, slow = (fake_quantize(x, fmt, saturate=saturate, backend=which) for which in (backend, "reference"))
    assert_same_bits(fast, slow)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@by_name
def test_values_and_midpoints_agree_with_the_reference(fmt, dtype, backend, assert_same_bits):
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
    assert_same_bits(fake_quantize(x, fmt, backend=backend), fake_quantize(x, fmt, backend="reference"))


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
def test_overflow_is_what_saturate_says(name, x, default, saturated, unsaturated, backend):
    for saturate, expected in ((None, default), (True, saturated), (False, unsaturated)):
        assert fake_quantize(torch.tensor([x]), name, saturate=saturate, backend=backend).item() == expected


def test_overflow_without_saturation_is_inf_or_else_nan(backend, assert_same_bits):
    x = torch.tensor([464.0, 464.001, -math.inf, 1.0])
    expected = torch.tensor([448.0, math.nan, math.nan, 1.0])
    assert_same_bits(fake_quantize(x, catalog.E4M3, saturate=False, backend=backend), expected)
    x = torch.tensor([61439.0, -61440.0, math.inf, 1.0])
    expected = torch.tensor([57344.0, -math.inf, math.inf, 1.0])
    assert_same_bits(fake_quantize(x, catalog.E5M2, saturate=False, backend=backend), expected)


@by_name
def test_zero_keeps_its_sign_where_the_format_has_one(fmt, backend):
    tiny = fmt.min_subnormal / 8 if fmt.name != "bf16" else 0.0
    zeros = fake_quantize(torch.tensor([0.0, -0.0, tiny, -tiny]), fmt, backend=backend)
    assert zeros.tolist() == [0.0] * 4
    assert torch.signbit(zeros).tolist() == [False, fmt.has_negative_zero] * 2


@by_name
def test_nan_stays_nan_of_either_sign(fmt, backend):
    x = torch.tensor([0x7FC00000, -0x00400000, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert torch.isnan(fake_quantize(x, fmt, backend=backend)).all()


@by_name
def test_quantising_twice_changes_nothing(fmt, backend, every_pattern, assert_same_bits):
    once = fake_quantize(every_pattern(torch.bfloat16).float(), fmt, backend=backend)
    assert_same_bits(fake_quantize(once, fmt, backend=backend), once)


def rounded_to_odd(value: float) -> float:
    """A float64 as a float32: cut off, the last bit set where that lost anything; at most the largest float32."""
    quantum = 2.0 ** (max(math.frexp(value)[1] - 1, -126) - 23)
    whole = math.floor(abs(value) / quantum)
    if whole * quantum != abs(value):
        whole |= 1
    return math.copysign(min(whole * quantum, torch.finfo(torch.float32).max), value)


@pytest.mark.parametrize("scale_rule", ["floor", "rceil"])
@pytest.mark.parametrize("name", FORMATS)
def test_float64_is_quantised_as_the_float32_that_rounding_to_odd_makes(name, scale_rule, backend, assert_same_bits):
    """For every magnitude; the last two rows are an amax just above max, and products beyond float32."""
    numbers = torch.Generator().manual_seed(4)
    magnitudes = torch.exp2(torch.arange(-150, 150, 5, dtype=torch.float64))
    x = torch.randn(60, 40, dtype=torch.float64, generator=numbers) * magnitudes[:, None]
    x[-2, :2] = torch.tensor([FORMATS[name].max * (1 + 2.0**-40), FORMATS[name].min_subnormal])
    x[-1] = torch.finfo(torch.float32).max
    narrow = torch.tensor([rounded_to_odd(value) for value in x.flatten().tolist()]).view(x.shape)
    for row, narrow_row in zip(x.split(1), narrow.split(1), strict=True):  # each with a scale of its own
        options = {"scale_rule": scale_rule, "backend": backend}
        assert_same_bits(fake_quantize(row, name, **options), fake_quantize(narrow_row, name, **options).double())
