"""`count_blocks`: C++ of each architecture and torch, held against plain Python."""

import math
from collections import Counter

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies

from megatron.quantscope.formats import BlockCounts, count_blocks
from megatron.quantscope.formats.blocks import DEPTHS, EXPONENTS, FRACTION_CLASSES, LEAST_EXPONENT
from tests.quantscope.formats.any_bits import any_rows

NARROW = (torch.bfloat16, torch.float16, torch.float32)
by_dtype = pytest.mark.parametrize("dtype", NARROW, ids=str)
any_example = hypothesis.settings(
    deadline=None, max_examples=40, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


def by_hand(x: torch.Tensor, axis: int) -> BlockCounts:
    """A block and an element at a time; x holds float32 numbers."""
    rows = np.moveaxis(x.double().abs().numpy(), axis, -1)
    amax, depths = np.zeros((EXPONENTS, FRACTION_CLASSES), np.int64), Counter()
    total = zero = nonfinite = 0
    for row in rows.reshape(-1, rows.shape[-1]):
        for start in range(0, len(row), 32):
            block = row[start : start + 32]
            total += 1
            zero += not block.any()
            nonfinite += not np.isfinite(block).all()
            if not block.any() or not np.isfinite(block).all():
                continue
            half, exponent = math.frexp(block.max())
            amax[exponent - 1 - LEAST_EXPONENT, sum(2 * half > limit for limit in (1.5, 1.75, 1.875))] += 1
            depths.update(min(DEPTHS - 1, exponent - math.frexp(value)[1]) for value in block if value)
    return BlockCounts(total, zero, nonfinite, amax, np.array([depths[depth] for depth in range(DEPTHS)]))


def assert_same(found: BlockCounts, expected: BlockCounts) -> None:
    assert (found.total, found.zero, found.nonfinite) == (expected.total, expected.zero, expected.nonfinite)
    np.testing.assert_array_equal(found.amax, expected.amax)
    np.testing.assert_array_equal(found.depths, expected.depths)


def check(x: torch.Tensor, axis: int) -> None:
    expected = by_hand(x, axis)
    for backend in ("cpp", "torch"):
        assert_same(count_blocks(x, axis=axis, depths=True, backend=backend), expected)
        without = count_blocks(x, axis=axis, backend=backend)
        assert without.depths is None
        np.testing.assert_array_equal(without.amax, expected.amax)


@by_dtype
@pytest.mark.parametrize("shape", [(64, 256), (40, 70), (3, 45, 33), (5000,), (35, 100), (1,), (1, 1, 2100)])
def test_every_shape_and_axis(shape, dtype, architecture):
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=numbers) * torch.exp2(5 * torch.randn(shape, generator=numbers))
    x = x.clamp(-6e4, 6e4).to(dtype)
    x.view(-1)[3::19], x.view(-1)[5::37] = 0.0, -0.0
    if x.numel() > 200:
        x.view(-1)[2], x.view(-1)[-3], x.view(-1)[100:140] = math.nan, math.inf, 1e-40
        x.view(-1)[40:130] = 0.0
    for axis in range(len(shape)):
        check(x, axis)


@by_dtype
@any_example
@hypothesis.given(data=strategies.data(), axis=strategies.sampled_from([0, 1]))
def test_any_bits(data, dtype, axis, architecture):
    x = data.draw(any_rows(dtype)).repeat(*data.draw(strategies.sampled_from([(1, 1), (20, 1), (3, 40)])))
    check(x, axis)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_pattern_as_the_largest_of_its_block(dtype, every_pattern, architecture):
    """Alone in a column, each value is an amax: every exponent and fraction there is."""
    check(every_pattern(dtype).view(1, -1), 0)


def test_fractions_at_their_limits(architecture):
    limits = torch.tensor([1.0, 1.5, 1.75, 1.875])
    above = torch.nextafter(limits, torch.tensor(2.0))
    x = torch.cat([limits, above, torch.tensor([2.0]).nextafter(torch.tensor(0.0))]).view(1, -1) * 2.0**-120
    found = count_blocks(x, axis=0).amax[-120 - LEAST_EXPONENT]
    assert found.tolist() == [3, 2, 2, 2]
    check(x, 0)


def test_float64_and_layouts_and_threads():
    x = torch.randn(70, 6, 64, generator=torch.Generator().manual_seed(1))
    expected = by_hand(x, 1)
    for view in (x, x.double(), x.transpose(0, 1).contiguous().transpose(0, 1), torch.stack([x, x], -1)[..., 0]):
        assert_same(count_blocks(view, axis=-2, depths=True), expected)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        big = x.repeat(1, 100, 1)
        assert_same(count_blocks(big, axis=1, depths=True), count_blocks(big, axis=1, depths=True, backend="torch"))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_empty(shape, backend):
    found = count_blocks(torch.empty(shape), depths=True, backend=backend)
    assert (found.total, found.zero, found.amax.sum(), found.depths.sum()) == (0, 0, 0, 0)


def test_bad_arguments_in_one_line():
    with pytest.raises(ValueError, match="backend 'triton' does not count: choose auto, cpp or torch"):
        count_blocks(torch.ones(3), backend="triton")
    with pytest.raises(ValueError, match=r"backend 'cpp' can not count torch.float64 on cpu"):
        count_blocks(torch.ones(3, dtype=torch.float64), backend="cpp")
