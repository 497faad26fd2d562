"""Sums without rounding, held against fractions and `math.fsum`."""

import math
import random
from fractions import Fraction

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies
from hypothesis.extra import numpy as arrays_of

from megatron.quantscope.formats import exact
from megatron.quantscope.formats.exact import UNIT_EXPONENT, ZERO, ExactSum

SMALLEST = 2.0**UNIT_EXPONENT
LARGEST = float(np.finfo(np.float64).max)
LIMBS, LIMB_BITS = 72, 32
any_example = hypothesis.settings(max_examples=150, deadline=None)
any_finite = strategies.floats(allow_nan=False, allow_infinity=False)
moderate = strategies.floats(-1e290, 1e290)
any_bits = arrays_of.arrays(np.uint64, strategies.integers(0, 40)).map(lambda bits: bits.view(np.float64))


def arrays(elements: strategies.SearchStrategy[float]) -> strategies.SearchStrategy[np.ndarray]:
    return arrays_of.arrays(np.float64, strategies.integers(0, 60), elements=elements, fill=strategies.nothing())


def fraction_of(total: ExactSum) -> Fraction:
    assert isinstance(total.units, int)
    return Fraction(total.units, 2**-UNIT_EXPONENT)


def sum_of(values: np.ndarray) -> Fraction:
    return sum(map(Fraction, values.tolist()), Fraction())


def half_way_above(value: float) -> Fraction:
    """The number in the middle between a float and the next, as if the exponents had no end."""
    return Fraction(value) + Fraction(math.ulp(value)) / 2


def assert_nearest(found: float, wanted: Fraction) -> None:
    """No float64 is nearer, and of two that are equally near it is the even one."""
    assert math.isfinite(found)
    distance = abs(Fraction(found) - wanted)
    for other in (math.nextafter(found, -math.inf), math.nextafter(found, math.inf)):
        if math.isfinite(other):
            others = abs(Fraction(other) - wanted)
            assert distance <= others
            if distance == others:
                assert int(np.float64(found).view(np.int64)) % 2 == 0


@any_example
@hypothesis.given(values=arrays(any_finite) | arrays(strategies.floats(-1e-307, 1e-307)) | any_bits)
def test_an_array_is_the_sum_of_its_fractions(values):
    values = values[np.isfinite(values)]
    assert fraction_of(ExactSum.of(values)) == sum_of(values)


def test_the_ends_of_float64_in_one_sum():
    values = np.array([LARGEST, LARGEST, SMALLEST, 3 * SMALLEST, 2.0**-1022, -(2.0**-1023), 1.0, -0.0])
    assert fraction_of(ExactSum.of(values)) == sum_of(values)
    assert fraction_of(ExactSum.of(np.concatenate([values, -values]))) == 0
    assert ExactSum.of(np.array([SMALLEST])).units == 1
    assert ExactSum.of(np.array([1.0, 1e100, 1.0, -1e100])) == ExactSum.of_float(2.0)


@any_example
@hypothesis.given(value=any_finite)
def test_one_number_is_that_number(value):
    total = ExactSum.of_float(value)
    assert fraction_of(total) == Fraction(value)
    assert float(total) == value
    assert total == ExactSum.of(np.array([value]))


@any_example
@hypothesis.given(
    values=arrays(any_finite), seed=strategies.integers(0, 99), cuts=strategies.sets(strategies.integers(0, 60))
)
def test_neither_order_nor_grouping_shows(values, seed, cuts):
    whole = ExactSum.of(values)
    shuffled = values.copy()
    np.random.default_rng(seed).shuffle(shuffled)
    parts = [ExactSum.of(part) for part in np.split(shuffled, sorted(cuts))]
    random.Random(seed).shuffle(parts)
    assert sum(parts, ZERO) == whole
    assert sum(map(ExactSum.of_float, shuffled.tolist()), ZERO) == whole


@any_example
@hypothesis.given(values=arrays(any_finite), chunk=strategies.integers(1, 7))
def test_chunks_do_not_show(values, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "_CHUNK", chunk)
        assert fraction_of(ExactSum.of(values)) == sum_of(values)


def test_many_equal_numbers_of_all_digits():
    for value in (math.nextafter(2.0, 0.0), -math.nextafter(2.0, 0.0), 2.0**-1022 - SMALLEST, LARGEST):
        assert fraction_of(ExactSum.of(np.full(300_001, value))) == 300_001 * Fraction(value)


def test_shape_and_strides_do_not_matter():
    values = np.random.default_rng(0).standard_normal((6, 8, 5))
    for view in (values, values.transpose(2, 0, 1), values[::2, 1:, ::-1], values[:0]):
        assert fraction_of(ExactSum.of(view)) == sum_of(view.ravel())


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_leaves_no_number(odd):
    nothing = ExactSum.of(np.array([1.0, odd, 2.0]))
    assert nothing.units is None
    assert nothing == ExactSum.of_float(odd)
    assert math.isnan(float(nothing))
    for total in (
        nothing + ExactSum.of_float(1.0),
        ExactSum.of_float(1.0) + nothing,
        nothing + nothing,
        nothing + ZERO,
    ):
        assert total.units is None


def test_the_empty_sum_is_zero():
    assert ExactSum.of(np.empty(0)) == ExactSum() == ZERO == ExactSum.of_float(-0.0)
    assert float(ZERO) == 0.0
    assert ZERO + ExactSum.of_float(0.1) == ExactSum.of_float(0.1)


@any_example
@hypothesis.given(
    limbs=arrays_of.arrays(
        np.int64,
        strategies.integers(0, LIMBS),
        elements=strategies.integers(-(1 << 63), (1 << 63) - 1) | strategies.integers(-3, 3),
        fill=strategies.just(0),
    )
)
def test_limbs_are_digits_that_may_be_negative_and_too_large(limbs):
    assert ExactSum.of_limbs(limbs).units == sum(limb << (LIMB_BITS * i) for i, limb in enumerate(limbs.tolist()))


def test_limbs_by_hand():
    assert ExactSum.of_limbs(np.zeros(LIMBS, dtype=np.int64)) == ZERO
    assert ExactSum.of_limbs(np.array([5, 0, 0])).units == 5
    assert ExactSum.of_limbs(np.array([0, 1])).units == 2**32
    assert ExactSum.of_limbs(np.array([2**32])) == ExactSum.of_limbs(np.array([0, 1]))  # a carry not yet passed on
    assert ExactSum.of_limbs(np.array([2**32 - 1, -1])).units == -1
    assert ExactSum.of_limbs(np.array([0, -1, 1])).units == 2**64 - 2**32
    one = np.zeros(LIMBS, dtype=np.int64)
    one[-UNIT_EXPONENT // LIMB_BITS] = 1 << (-UNIT_EXPONENT % LIMB_BITS)
    assert float(ExactSum.of_limbs(one)) == 1.0


@any_example
@hypothesis.given(values=arrays(moderate) | arrays(strategies.floats(-1e-300, 1e-300)))
def test_a_sum_is_rounded_once(values):
    total = ExactSum.of(values)
    assert float(total) == math.fsum(values)
    assert_nearest(float(total), fraction_of(total))


@any_example
@hypothesis.given(value=strategies.floats(2.0**-1000, 1e300), sign=strategies.sampled_from([1, -1]))
def test_ties_go_to_the_even_neighbour(value, sign):
    middle = half_way_above(value)
    units = int(middle * 2**-UNIT_EXPONENT)
    assert Fraction(units, 2**-UNIT_EXPONENT) == middle
    above, below = math.nextafter(value, math.inf), value
    even = below if int(np.float64(below).view(np.int64)) % 2 == 0 else above
    assert float(ExactSum(sign * units)) == sign * even
    assert float(ExactSum(sign * (units + 1))) == sign * above
    assert float(ExactSum(sign * (units - 1))) == sign * below


@pytest.mark.parametrize("sign", [1, -1])
def test_beyond_float64_it_reads_as_infinite(sign):
    largest = ExactSum.of_float(LARGEST)
    limit = int(half_way_above(LARGEST) * 2**-UNIT_EXPONENT)
    assert float(ExactSum(sign * (limit - 1))) == sign * LARGEST
    assert float(ExactSum(sign * limit)) == sign * math.inf
    twice = largest + largest
    assert float(ExactSum(sign * twice.units)) == sign * math.inf
    assert twice + ExactSum.of_float(-LARGEST) == largest  # and nothing is lost by then
