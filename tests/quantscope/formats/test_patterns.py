"""Counts of 16-bit patterns, and what follows from them."""

from fractions import Fraction

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from megatron.quantscope.formats import bit_pattern_counts, fake_quantize, patterns
from megatron.quantscope.formats.patterns import PATTERN_DTYPES, bit_patterns, statistics_of_patterns, weighted_sum
from megatron.quantscope.formats.statistics import TensorStatistics
from tests.quantscope.formats.one_by_one import exact, one_by_one

by_dtype = pytest.mark.parametrize("dtype", PATTERN_DTYPES, ids=str)
any_example = hypothesis.settings(max_examples=60, deadline=None)
MANY = 1 << 40  # of one pattern


def random_patterns(dtype: torch.dtype, *shape: int) -> Tensor:
    bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=torch.Generator().manual_seed(0))
    return bits.to(torch.int16).view(dtype)


@by_dtype
def test_every_pattern_is_there_once_at_its_place(dtype, every_pattern):
    x = bit_patterns(dtype)
    assert torch.equal(x.view(torch.int16), every_pattern(dtype).view(torch.int16))
    counts = bit_pattern_counts(x)
    assert counts.shape == (1 << 16,)
    assert counts.dtype == np.int64
    assert (counts == 1).all()
    assert statistics_of_patterns(counts, dtype) == one_by_one(x)


def test_counts_are_by_unsigned_pattern():
    counts = bit_pattern_counts(torch.tensor([1.0, -1.0, -1.0, 0.0], dtype=torch.bfloat16))
    assert {int(i): int(counts[i]) for i in np.flatnonzero(counts)} == {0x0000: 1, 0x3F80: 1, 0xBF80: 2}
    counts = bit_pattern_counts(torch.tensor([-0.0, 2.0, torch.inf], dtype=torch.float16))
    assert np.flatnonzero(counts).tolist() == [0x4000, 0x7C00, 0x8000]


@by_dtype
def test_neither_chunks_nor_layout_show(dtype, monkeypatch):
    x = random_patterns(dtype, 101, 14)
    for view in (x, x.t(), x[:, ::2], x[:, 3], x[3:50, 2:9], x[:1].expand(7, -1), x[4, 5], x[:0]):
        bits = view.contiguous().view(torch.int16).flatten().numpy().view(np.uint16)
        expected = np.bincount(bits, minlength=1 << 16)
        assert (bit_pattern_counts(view) == expected).all()
        with monkeypatch.context() as patch:
            patch.setattr(patterns, "_COUNT_CHUNK", 64)
            assert (bit_pattern_counts(view) == expected).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int16, torch.uint8, torch.bool], ids=str)
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(
        TypeError, match=rf"^bit patterns of {dtype} can not be counted: the tensor must be bfloat16 or"
    ):
        bit_pattern_counts(torch.ones(3, dtype=dtype))


@by_dtype
def test_statistics_follow_from_counts(dtype):
    for x in (random_patterns(dtype, 999), random_patterns(dtype, 3), random_patterns(dtype, 0)):
        assert statistics_of_patterns(bit_pattern_counts(x), dtype) == one_by_one(x)
    assert statistics_of_patterns(np.zeros(1 << 16, dtype=np.int64), dtype) == TensorStatistics(exponents={})


@by_dtype
def test_statistics_of_very_many_elements(dtype):
    """As of a tensor that holds each pattern so many times: all counts and sums are as many times larger."""
    x = bit_patterns(dtype)
    once = one_by_one(x)
    times = MANY + 12_345
    found = statistics_of_patterns(np.full(1 << 16, times), dtype)
    assert (found.count, found.zero, found.nan, found.inf) == tuple(
        times * count for count in (once.count, once.zero, once.nan, once.inf)
    )
    assert found.exact_squares.units == once.exact_squares.units * times
    assert (found.min, found.max, found.exact_sum.units) == (once.min, once.max, 0)
    assert found.exponents == {exponent: times * count for exponent, count in once.exponents.items()}


@any_example
@hypothesis.given(
    terms=strategies.lists(
        strategies.tuples(
            strategies.integers(-(1 << 22) + 1, (1 << 22) - 1),
            strategies.integers(-260, 200),
            strategies.integers(0, MANY),
        ),
        max_size=30,
    )
)
def test_weighted_sums_are_not_rounded(terms):
    values = [digits * 2.0**exponent for digits, exponent, _ in terms]
    counts = np.array([count for _, _, count in terms], dtype=np.int64)
    expected = sum((Fraction(value) * int(count) for value, count in zip(values, counts, strict=True)), Fraction())
    assert weighted_sum(np.array(values, dtype=np.float64), counts) == exact(expected)


@by_dtype
def test_error_of_an_elementwise_format_follows_from_counts(dtype):
    x = (torch.randn(3_000, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    all_values = bit_patterns(dtype)
    errors = (all_values.double() - fake_quantize(all_values, "hifp8").double()).nan_to_num(0, 0, 0).numpy()
    squares = [Fraction(error) ** 2 for error in (x.double() - fake_quantize(x, "hifp8").double()).tolist()]
    assert weighted_sum(errors**2, bit_pattern_counts(x)) == exact(sum(squares, Fraction()))
    assert sum(squares) > 0
