"""Formats with a scale a block: golden vectors, and any bits of any dtype against the reference."""

import math

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies

from megatron.quantscope.formats import FORMATS, fake_quantize
from tests.quantscope.formats.any_bits import DTYPES, any_rows

GOLDEN = {
    "mxfp8": "mxfp8_e4m3_block32",
    "mxfp8_e5m2": "mxfp8_e5m2_block32",
    "mxfp6_e2m3": "mxfp6_e2m3_block32",
    "mxfp6_e3m2": "mxfp6_e3m2_block32",
    "mxfp4": "mxfp4_block32",
}
RCEIL = ("mxfp8", "mxfp8_e5m2", "mxfp4")
REFERENCE_BLOCKS = 400  # of the whole golden set: the reference takes a block at a time
by_name = pytest.mark.parametrize("name", GOLDEN)


@pytest.fixture
def golden_blocks(golden, backend):
    """The golden arrays of a format; for the reference some blocks of them, evenly spread."""

    def load(name: str) -> dict[str, np.ndarray]:
        vectors = golden(GOLDEN[name])
        step = max(1, len(vectors["x"]) // REFERENCE_BLOCKS) if backend == "reference" else 1
        return {key: array[::step] for key, array in vectors.items()}

    return load


@by_name
def test_floor_is_golden_along_any_axis(name, backend, golden_blocks, assert_same_bits):
    vectors = golden_blocks(name)
    x, y = torch.from_numpy(vectors["x"]), vectors["y"]
    assert_same_bits(fake_quantize(x, name, backend=backend), y)
    assert_same_bits(fake_quantize(x.t(), name, axis=0, backend=backend).t(), y)
    assert_same_bits(fake_quantize(x.t().contiguous(), name, axis=0, backend=backend).t(), y)
    assert_same_bits(fake_quantize(x[:, :, None].expand(-1, -1, 3), name, axis=1, backend=backend)[..., 2], y)


@pytest.mark.parametrize("name", RCEIL)
def test_rceil_is_golden(name, backend, golden_blocks, assert_same_bits):
    vectors = golden_blocks(name)
    x = torch.from_numpy(vectors["x"])
    assert_same_bits(fake_quantize(x, name, scale_rule="rceil", backend=backend), vectors["y_rceil"])


@by_name
def test_bf16_input_is_golden(name, backend, golden_blocks, assert_same_bits):
    vectors = golden_blocks(name)
    is_bf16 = ((vectors["x"].view(np.uint32) & 0xFFFF) == 0).all(axis=1)
    x, y = (torch.from_numpy(vectors[key][is_bf16]).bfloat16() for key in ("x", "y"))
    assert len(x) > 20
    assert_same_bits(fake_quantize(x, name, backend=backend), y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@hypothesis.settings(
    max_examples=100, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(
    data=strategies.data(),
    name=strategies.sampled_from([*GOLDEN, "nvfp4"]),
    scale_rule=strategies.sampled_from(["floor", "rceil"]),
    axis=strategies.sampled_from([0, 1]),
)
def test_any_bits_in_any_row_length_agree_with_the_reference(
    data, dtype, name, scale_rule, axis, backend, assert_same_bits
):
    if backend == "reference":
        pytest.skip("the reference is what the others are held against")
    x = data.draw(any_rows(dtype))
    x = x if axis == 1 else x.t().contiguous()
    fast, slow = (
        fake_quantize(x, name, axis=axis, scale_rule=scale_rule, backend=which) for which in (backend, "reference")
    )
    assert_same_bits(fast, slow)


@by_name
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_nan_or_inf_makes_its_block_nan_and_no_other(name, bad, backend):
    x = torch.ones(3, 64)
    x[1, 40] = bad
    is_nan = torch.isnan(fake_quantize(x, name, backend=backend))
    assert is_nan[1, 32:].all()
    assert is_nan.sum() == 32


@by_name
def test_zero_block_keeps_its_signs(name, backend):
    y = fake_quantize(torch.tensor([0.0, -0.0] * 16), name, backend=backend)
    assert torch.signbit(y).tolist() == [False, True] * 16


@by_name
def test_short_last_block_has_a_scale_of_its_own(name, backend, assert_same_bits):
    x = torch.randn(5, 70, generator=torch.Generator().manual_seed(0))
    x[:, :64] *= 1e6
    y = fake_quantize(x, name, backend=backend)
    for part in (slice(0, 32), slice(32, 64), slice(64, 70)):
        assert_same_bits(y[:, part], fake_quantize(x[:, part].contiguous(), name, backend=backend))
    assert_same_bits(fake_quantize(x.t(), name, axis=0, backend=backend).t(), y)
    assert_same_bits(fake_quantize(x.t().contiguous(), name, axis=0, backend=backend).t(), y)


def test_rules_differ_where_amax_lies_above_the_largest_value(backend):
    """amax = 500: floor keeps the scale 1 and saturates at 448; rceil doubles it and rounds 500/2 to 256."""
    x = torch.tensor([500.0, 17.0])
    assert fake_quantize(x, "mxfp8", scale_rule="floor", backend=backend).tolist() == [448.0, 16.0]
    assert fake_quantize(x, "mxfp8", scale_rule="rceil", backend=backend).tolist() == [512.0, 16.0]


def test_rceil_takes_the_smallest_scale_where_it_is_enough(backend):
    """amax / max = 2^-127 exactly: the scale is 2^-127, and the smallest element is worth 2^-136."""
    x = torch.tensor([448 * 2.0**-127, 2.0**-136, 1.9 * 2.0**-137])
    y = fake_quantize(x, "mxfp8", scale_rule="rceil", backend=backend)
    assert y.tolist() == [448 * 2.0**-127, 2.0**-136, 2.0**-136]
    larger = torch.tensor([449 * 2.0**-127, 2.0**-136, 1.9 * 2.0**-137])
    assert fake_quantize(larger, "mxfp8", scale_rule="rceil", backend=backend)[1:].tolist() == [0.0, 0.0]


@by_name
def test_block_error_is_bounded_by_half_a_step(name, backend):
    """Where nothing saturates (rceil): half a unit in the last place of the element, or half the smallest step."""
    fmt = FORMATS[name]
    x = torch.randn(200, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(dim=1, keepdim=True) / fmt.max)))
    bound = torch.maximum(x.abs() * 2.0 ** -(fmt.mantissa_bits + 1), 0.5 * fmt.min_subnormal * scale)
    error = (x - fake_quantize(x, name, scale_rule="rceil", backend=backend)).abs()
    assert (error <= bound).all()
    assert (error > bound / 4).any()
