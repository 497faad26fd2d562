"""The record of a tensor's statistics: its figures, merging, JSON, and the ratio of signal to noise."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

from megatron.quantscope.formats.exact import ZERO, ExactSum
from megatron.quantscope.formats.measuring import measure
from megatron.quantscope.formats.statistics import TensorStatistics, merge, sqnr_db
from tests.quantscope.formats.any_bits import DTYPES

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}
EMPTY = TensorStatistics(exponents={})


def any_bits(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    integer = INTEGER[dtype.itemsize]
    limits, numbers = torch.iinfo(integer), torch.Generator().manual_seed(seed)
    return torch.randint(limits.min, limits.max, (count,), dtype=integer, generator=numbers).view(dtype)


def json_text(statistics: TensorStatistics) -> str:
    return json.dumps(statistics.to_json(), allow_nan=False)


def from_text(text: str) -> TensorStatistics:
    return TensorStatistics.from_json(json.loads(text))


def test_nothing_has_no_figures():
    assert [EMPTY.amax, EMPTY.mean, EMPTY.rms, EMPTY.std, EMPTY.min, EMPTY.max] == [None] * 6
    assert (EMPTY.count, EMPTY.finite, EMPTY.sum, EMPTY.sum_squares) == (0, 0, 0.0, 0.0)


def test_derived_figures_are_those_of_numpy():
    x = torch.randn(1_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 5
    found, values = measure(x), x.numpy()
    assert found.amax == np.abs(values).max()
    assert found.mean == pytest.approx(values.mean(), rel=1e-15)
    assert found.std == pytest.approx(values.std(), rel=1e-13)
    assert found.rms == pytest.approx(math.sqrt((values**2).mean()), rel=1e-14)
    assert found.sum == math.fsum(values)
    assert found.sum_squares == math.fsum(values * values)


def test_non_finite_values_are_left_out_of_the_figures():
    found = measure(torch.tensor([math.nan, math.inf, -math.inf, -3.0]))
    assert (found.min, found.max, found.amax, found.sum, found.mean, found.finite) == (-3.0, -3.0, 3.0, -3.0, -3.0, 1)
    assert (found.rms, found.std) == (3.0, 0.0)
    nothing = measure(torch.tensor([math.nan, math.inf]))
    assert (nothing.min, nothing.max, nothing.sum, nothing.mean, nothing.std) == (None, None, 0.0, None, None)


def test_amax_is_of_either_sign_and_never_negative():
    assert measure(torch.tensor([-5.0, 3.0])).amax == 5.0
    assert measure(torch.tensor([2.0, 3.0])).amax == 3.0
    zero = measure(torch.tensor([-0.0])).amax
    assert zero == 0.0
    assert math.copysign(1.0, zero) == 1.0


def test_standard_deviation_by_hand():
    assert measure(torch.full((1000,), 0.1)).std == pytest.approx(0.0, abs=1e-8)
    assert measure(torch.tensor([1.0, -1.0])).std == 1.0


@pytest.mark.parametrize("values", [[1e200, 1e200], [1e200, -3e200], [1.5e308, 1.5e308]], ids=str)
def test_figures_of_huge_float64_are_no_wrong_numbers(values):
    """The squares are beyond float64: there is no number for what needs them, and no exception."""
    found = measure(torch.tensor(values, dtype=torch.float64))
    assert math.isnan(found.sum_squares)
    assert math.isnan(found.rms)
    assert math.isnan(found.std)
    assert found.amax == max(map(abs, values))
    assert found.mean == pytest.approx(sum(value / len(values) for value in values), rel=1e-15) or math.isinf(found.sum)


def test_merging_is_exact_where_floats_are_not():
    large, one = measure(torch.tensor([2.0**100])), measure(torch.tensor([1.0]))
    minus = measure(torch.tensor([-(2.0**100)]))
    for parts in itertools.permutations([large, one, minus]):
        total = merge(merge(parts[0], parts[1]), parts[2])
        assert total.sum == 1.0
        assert total.exact_squares.units == (2**201 + 1) << 1074
        assert (total.count, total.min, total.max) == (3, -(2.0**100), 2.0**100)
        assert list(total.exponents.items()) == [(0, 1), (100, 2)]


def test_merging_by_hand():
    a = TensorStatistics(
        count=9,
        zero=1,
        nan=2,
        inf=3,
        min=-1.0,
        max=8.0,
        exact_sum=ExactSum(5),
        exact_squares=ExactSum(6),
        exponents={-1: 4, 3: 1},
    )
    b = TensorStatistics(
        count=7,
        zero=2,
        nan=0,
        inf=1,
        min=-2.0,
        max=4.0,
        exact_sum=ExactSum(-7),
        exact_squares=ExactSum(1),
        exponents={-2: 1, 3: 2},
    )
    both = TensorStatistics(
        count=16,
        zero=3,
        nan=2,
        inf=4,
        min=-2.0,
        max=8.0,
        exact_sum=ExactSum(-2),
        exact_squares=ExactSum(7),
        exponents={-2: 1, -1: 4, 3: 3},
    )
    assert merge(a, b) == merge(b, a) == both
    assert list(merge(a, b).exponents) == [-2, -1, 3]
    assert merge(a, EMPTY) == merge(EMPTY, a) == a
    assert a.exponents == {-1: 4, 3: 1}


def test_merging_with_what_has_nothing_finite():
    nan, one = measure(torch.tensor([math.nan])), measure(torch.tensor([1.0]))
    assert merge(nan, nan).min is None
    assert (merge(nan, one).min, merge(one, nan).max, merge(nan, one).nan) == (1.0, 1.0, 1)


def test_no_number_stays_no_number():
    nothing = measure(torch.tensor([1e200], dtype=torch.float64))
    total = merge(nothing, measure(torch.tensor([2.0])))
    assert total.exact_squares.units is None
    assert math.isnan(total.sum_squares)
    assert total.sum == 1e200


@by_dtype
def test_json_holds_everything_and_sums_as_they_were_rounded(dtype):
    found = measure(any_bits(dtype, 200))
    text = json_text(found)
    back = from_text(text)
    for field in ("count", "zero", "nan", "inf", "min", "max", "exponents", "finite", "amax"):
        assert getattr(back, field) == getattr(found, field), field
    assert back.sum == found.sum
    assert back.sum_squares == found.sum_squares or (math.isnan(back.sum_squares) and math.isnan(found.sum_squares))
    assert json_text(back) == text
    assert from_text(json_text(back)) == back
    assert math.isnan(found.sum_squares) == (dtype == torch.float64)


def test_json_gives_back_what_needed_no_rounding_and_no_more():
    plain = measure(torch.tensor([1.5, -2.0, 0.0, math.nan, math.inf]))
    assert from_text(json_text(plain)) == plain
    long_sum = measure(torch.tensor([1.5, 2.0**-149]))
    back = from_text(json_text(long_sum))
    assert back.exact_sum == ExactSum.of_float(1.5) != long_sum.exact_sum
    assert back.exponents == long_sum.exponents == {-149: 1, 0: 1}


def test_json_by_hand():
    assert measure(torch.tensor([0.5, -3.0, 0.0, math.nan, math.inf])).to_json() == {
        "count": 5,
        "zero": 1,
        "nan": 1,
        "inf": 1,
        "min": -3.0,
        "max": 0.5,
        "sum": -2.5,
        "sum_squares": 9.25,
        "exponents": {"-1": 1, "1": 1},
    }


def test_json_of_nothing_finite():
    for x in (torch.tensor([math.nan, math.inf]), torch.empty(0)):
        found = measure(x)
        assert from_text(json_text(found)) == found
        assert (found.to_json()["min"], found.to_json()["exponents"]) == (None, {})


def test_json_of_a_sum_beyond_float64():
    found = measure(torch.full((3,), 1.5e308, dtype=torch.float64))
    assert found.sum == math.inf
    assert (found.to_json()["sum"], found.to_json()["sum_squares"]) == (None, None)
    back = from_text(json_text(found))
    assert math.isnan(back.sum)
    assert (back.count, back.max) == (3, 1.5e308)


def test_sums_start_at_zero():
    assert (EMPTY.exact_sum, EMPTY.exact_squares) == (ZERO, ZERO)


def test_sqnr():
    assert sqnr_db(100.0, 1.0, 0) == pytest.approx(20.0)
    assert sqnr_db(1.0, 2.0, 0) == pytest.approx(-3.0103, abs=1e-4)
    assert sqnr_db(5.0, 0.0, 0) == math.inf
    assert sqnr_db(5.0, 1.0, 1) == sqnr_db(0.0, 0.0, 2) == -math.inf
    assert math.isnan(sqnr_db(0.0, 0.0, 0))
