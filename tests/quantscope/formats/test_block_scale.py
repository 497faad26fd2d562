"""OCP MX: golden vectors, the reference on adversarial blocks, and gfloat as an independent reader of the spec."""

import math

import gfloat
import gfloat.formats
import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies
from hypothesis.extra import numpy as arrays_of

from megatron.quantscope.formats import FORMATS, fake_quantize

GOLDEN = {
    "mxfp8": "mxfp8_e4m3_block32",
    "mxfp8_e5m2": "mxfp8_e5m2_block32",
    "mxfp6_e2m3": "mxfp6_e2m3_block32",
    "mxfp6_e3m2": "mxfp6_e3m2_block32",
    "mxfp4": "mxfp4_block32",
}
GFLOAT = {
    "mxfp8": gfloat.formats.format_info_mxfp8_e4m3,
    "mxfp8_e5m2": gfloat.formats.format_info_mxfp8_e5m2,
    "mxfp6_e2m3": gfloat.formats.format_info_mxfp6_e2m3,
    "mxfp6_e3m2": gfloat.formats.format_info_mxfp6_e3m2,
    "mxfp4": gfloat.formats.format_info_mxfp4_e2m1,
}
RCEIL = ("mxfp8", "mxfp8_e5m2", "mxfp4")
REFERENCE_BLOCKS = 400  # of the whole golden set: the reference takes a block at a time
by_name = pytest.mark.parametrize("name", GOLDEN)


def narrow(x: np.ndarray, count: int) -> np.ndarray:
    """At most `count` rows, evenly spread."""
    return x[:: max(1, len(x) // count)]


@by_name
def test_floor_is_golden_along_any_axis(name, golden, assert_same_bits):
    vectors = golden(GOLDEN[name])
    x, y = torch.from_numpy(vectors["x"]), vectors["y"]
    assert_same_bits(fake_quantize(x, name), y)
    assert_same_bits(fake_quantize(x.t(), name, axis=0).t(), y)
    assert_same_bits(fake_quantize(x.t().contiguous(), name, axis=0).t(), y)
    assert_same_bits(fake_quantize(x[:, :, None].expand(-1, -1, 3), name, axis=1)[..., 2], y)


@pytest.mark.parametrize("name", RCEIL)
def test_rceil_is_golden(name, golden, assert_same_bits):
    vectors = golden(GOLDEN[name])
    assert_same_bits(fake_quantize(torch.from_numpy(vectors["x"]), name, scale_rule="rceil"), vectors["y_rceil"])


@by_name
def test_reference_is_golden(name, golden, assert_same_bits):
    vectors = {key: narrow(array, REFERENCE_BLOCKS) for key, array in golden(GOLDEN[name]).items()}
    x = torch.from_numpy(vectors["x"])
    assert_same_bits(fake_quantize(x, name, backend="reference"), vectors["y"])
    if "y_rceil" in vectors:
        assert_same_bits(fake_quantize(x, name, scale_rule="rceil", backend="reference"), vectors["y_rceil"])


@by_name
def test_bf16_input_is_golden(name, golden, assert_same_bits):
    vectors = golden(GOLDEN[name])
    is_bf16 = ((vectors["x"].view(np.uint32) & 0xFFFF) == 0).all(axis=1)
    x, y = (torch.from_numpy(vectors[key][is_bf16]).bfloat16() for key in ("x", "y"))
    assert len(x) > 20
    assert_same_bits(fake_quantize(x, name), y)


@by_name
def test_gfloat_agrees(name, assert_same_bits):
    numbers = np.random.default_rng(1)
    x = (numbers.standard_normal((60, 32)) * 2.0 ** numbers.integers(-90, 90, (60, 1))).astype(np.float32)
    expected = [gfloat.quantize_block(GFLOAT[name], row, gfloat.compute_scale_amax) for row in x.astype(np.float64)]
    assert_same_bits(fake_quantize(torch.from_numpy(x), name), np.array(expected, dtype=np.float32))


BITS = strategies.one_of(
    strategies.integers(0, 2**32 - 1),
    strategies.sampled_from([0x00000000, 0x80000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x3F7FFFFF]),
    strategies.integers(0x3F000000, 0x41000000),
)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    bits=arrays_of.arrays(
        np.uint32, strategies.tuples(strategies.integers(1, 3), strategies.integers(1, 70)), elements=BITS
    ),
    name=strategies.sampled_from([*GOLDEN, "nvfp4"]),
    scale_rule=strategies.sampled_from(["floor", "rceil"]),
)
def test_any_bits_in_any_row_length_agree_with_the_reference(bits, name, scale_rule, assert_same_bits):
    x = torch.from_numpy(bits.view(np.float32))
    fast, slow = (fake_quantize(x, name, scale_rule=scale_rule, backend=b) for b in ("torch", "reference"))
    assert_same_bits(fast, slow)


@by_name
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_nan_or_inf_makes_its_block_nan_and_no_other(name, bad):
    x = torch.ones(3, 64)
    x[1, 40] = bad
    is_nan = torch.isnan(fake_quantize(x, name))
    assert is_nan[1, 32:].all()
    assert is_nan.sum() == 32


@by_name
def test_zero_block_keeps_its_signs(name):
    y = fake_quantize(torch.tensor([0.0, -0.0] * 16), name)
    assert torch.signbit(y).tolist() == [False, True] * 16


@by_name
def test_short_last_block_has_a_scale_of_its_own(name, assert_same_bits):
    x = torch.randn(5, 70, generator=torch.Generator().manual_seed(0))
    x[:, :64] *= 1e6
    y = fake_quantize(x, name)
    for part in (slice(0, 32), slice(32, 64), slice(64, 70)):
        assert_same_bits(y[:, part], fake_quantize(x[:, part].contiguous(), name))
    assert_same_bits(fake_quantize(x.t(), name, axis=0).t(), y)
    assert_same_bits(fake_quantize(x.t().contiguous(), name, axis=0).t(), y)


def test_rules_differ_where_amax_lies_above_the_largest_value():
    """amax = 500: floor keeps the scale 1 and saturates at 448; rceil doubles it and rounds 500/2 to 256."""
    x = torch.tensor([500.0, 17.0])
    assert fake_quantize(x, "mxfp8", scale_rule="floor").tolist() == [448.0, 16.0]
    assert fake_quantize(x, "mxfp8", scale_rule="rceil").tolist() == [512.0, 16.0]


def test_rceil_takes_the_smallest_scale_where_it_is_enough():
    """amax / max = 2^-127 exactly: the scale is 2^-127, and the smallest element is worth 2^-136."""
    x = torch.tensor([448 * 2.0**-127, 2.0**-136, 1.9 * 2.0**-137])
    assert fake_quantize(x, "mxfp8", scale_rule="rceil").tolist() == [448 * 2.0**-127, 2.0**-136, 2.0**-136]
    larger = torch.tensor([449 * 2.0**-127, 2.0**-136, 1.9 * 2.0**-137])
    assert fake_quantize(larger, "mxfp8", scale_rule="rceil")[1:].tolist() == [0.0, 0.0]


@by_name
def test_block_error_is_bounded_by_half_a_step(name):
    """Where nothing saturates (rceil): half a unit in the last place of the element, or half the smallest step."""
    fmt = FORMATS[name]
    x = torch.randn(200, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(dim=1, keepdim=True) / fmt.max)))
    bound = torch.maximum(x.abs() * 2.0 ** -(fmt.mantissa_bits + 1), 0.5 * fmt.min_subnormal * scale)
    error = (x - fake_quantize(x, name, scale_rule="rceil")).abs()
    assert (error <= bound).all()
    assert (error > bound / 4).any()
