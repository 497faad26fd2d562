import json
import math

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies
from hypothesis.extra import numpy as arrays_of

from megatron.quantscope.formats import fake_quantize, statistics
from megatron.quantscope.formats.statistics import TensorStatistics, bit_pattern_counts, bit_patterns, measure, merge

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
by_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def plain_statistics(tensor: torch.Tensor) -> TensorStatistics:
    """One Python number after the other."""
    values = tensor.double().flatten().tolist()
    finite = [value for value in values if math.isfinite(value)]
    exponents: dict[int, int] = {}
    for value in finite:
        if value:
            exponent = math.frexp(value)[1] - 1
            exponents[exponent] = exponents.get(exponent, 0) + 1
    return TensorStatistics(
        count=len(values),
        zero=sum(value == 0 for value in values),
        nan=sum(map(math.isnan, values)),
        inf=sum(map(math.isinf, values)),
        min=min(finite, default=None),
        max=max(finite, default=None),
        sum=math.fsum(finite),
        sum_squares=math.fsum(value * value for value in finite),
        exponents=dict(sorted(exponents.items())),
    )


def assert_equal(a: TensorStatistics, b: TensorStatistics, magnitude: float = 1.0) -> None:
    """Counts and extremes exactly; sums to float64's rounding of the terms (of sum |x| = `magnitude`)."""
    for field in ("count", "zero", "nan", "inf", "min", "max", "exponents"):
        assert getattr(a, field) == getattr(b, field), field
    assert a.sum == pytest.approx(b.sum, abs=1e-13 * magnitude, rel=1e-13)
    assert a.sum_squares == pytest.approx(b.sum_squares, rel=1e-12)
    assert list(a.exponents) == sorted(a.exponents)


def wild(dtype: torch.dtype, shape: tuple[int, ...] = (2_000,), seed: int = 0) -> torch.Tensor:
    """Random bits: all exponents, subnormals, NaN and Inf."""
    info = torch.finfo(dtype)
    integer = INTEGER[info.bits // 8]
    limits = torch.iinfo(integer)
    bits = torch.randint(limits.min, limits.max, shape, dtype=integer, generator=torch.Generator().manual_seed(seed))
    x = bits.view(dtype)
    x.view(-1)[:6] = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, info.smallest_normal / 2], dtype=dtype)
    return x


@by_dtype
def test_random_bits_are_measured_as_one_by_one(dtype):
    x = wild(dtype)
    if dtype == torch.float64:  # whose squares would overflow
        x = torch.where(x.abs() > 1e150, torch.ones_like(x), x)
    expected = plain_statistics(x)
    assert_equal(measure(x), expected, magnitude=float(x[x.isfinite()].double().abs().sum()))
    assert expected.nan > 0


@by_dtype
def test_subnormals_are_counted_in_their_binades(dtype):
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    exponent = math.frexp(smallest)[1] - 1
    x = torch.tensor([smallest, 2 * smallest, 3 * smallest, -4 * smallest, 0.0], dtype=dtype)
    assert measure(x).exponents == {exponent: 1, exponent + 1: 2, exponent + 2: 1}


def test_every_pattern_of_16_bits_is_counted_once():
    for dtype in (torch.bfloat16, torch.float16):
        x = bit_patterns(dtype)
        assert (bit_pattern_counts(x) == 1).all()
        assert_equal(measure(x), plain_statistics(x), magnitude=float(x[x.isfinite()].double().abs().sum()))


def test_pattern_counts_are_by_unsigned_pattern():
    counts = bit_pattern_counts(torch.tensor([1.0, -1.0, -1.0, 0.0], dtype=torch.bfloat16))
    assert {int(i): int(counts[i]) for i in np.flatnonzero(counts)} == {0x0000: 1, 0x3F80: 1, 0xBF80: 2}


def test_error_of_an_elementwise_format_follows_from_pattern_counts():
    x = torch.randn(3_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    patterns = bit_patterns(torch.bfloat16)
    error = (patterns.double() - fake_quantize(patterns, "hifp8").double()).nan_to_num(0, 0, 0).numpy()
    direct = (x.double() - fake_quantize(x, "hifp8").double()).square().sum().item()
    assert float((bit_pattern_counts(x) * error**2).sum()) == pytest.approx(direct, rel=1e-12)


def test_patterns_of_other_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"bit patterns of torch.float32 can not be counted"):
        bit_pattern_counts(torch.ones(3))


@by_dtype
def test_chunks_do_not_show(dtype, monkeypatch):
    x = wild(dtype, (101, 7))[:, :5]
    whole = measure(x)
    monkeypatch.setattr(statistics, "_WIDE_CHUNK", 64)
    monkeypatch.setattr(statistics, "_COUNT_CHUNK", 64)
    pieces = measure(x)
    assert pieces.exponents == whole.exponents
    assert (pieces.count, pieces.zero, pieces.nan, pieces.inf) == (whole.count, whole.zero, whole.nan, whole.inf)
    assert (pieces.min, pieces.max) == (whole.min, whole.max)


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint8, torch.int8, torch.int64, torch.bool],
    ids=str,
)
def test_other_real_dtypes(dtype):
    x = torch.tensor([1, 0, 2, 1, 64]).to(torch.float32).to(dtype)
    assert_equal(measure(x), plain_statistics(x))


@pytest.mark.parametrize("x", [torch.zeros(3, dtype=torch.complex64), torch.zeros(3, dtype=torch.complex128)])
def test_complex_is_refused(x):
    with pytest.raises(TypeError, match="has no real values"):
        measure(x)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32], ids=str)
def test_empty_and_single(dtype):
    empty = measure(torch.empty(0, 3, dtype=dtype))
    assert empty == TensorStatistics(exponents={})
    assert [empty.amax, empty.mean, empty.rms, empty.std] == [None] * 4
    single = measure(torch.tensor(-2, dtype=dtype))
    assert (single.count, single.min, single.exponents) == (1, -2.0, {1: 1})


def test_layout_does_not_matter():
    x = torch.randn(8, 9, generator=torch.Generator().manual_seed(0))
    expected = measure(x)
    for view in (x.t(), x.t().contiguous().t(), torch.stack([x, x], dim=-1)[..., 1]):
        assert_equal(measure(view), expected, magnitude=100.0)
    assert measure(x[:1].expand(5, -1)).count == 45
    assert measure(x.requires_grad_()).count == 72


def test_derived_figures_are_those_of_numpy():
    x = torch.randn(1_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 5
    found, values = measure(x), x.numpy()
    assert found.amax == np.abs(values).max()
    assert found.mean == pytest.approx(values.mean(), rel=1e-12)
    assert found.std == pytest.approx(values.std(), rel=1e-12)
    assert found.rms == pytest.approx(math.sqrt((values**2).mean()), rel=1e-12)


def test_non_finite_values_are_left_out_of_the_figures():
    found = measure(torch.tensor([math.nan, math.inf, -math.inf, -3.0]))
    assert (found.min, found.max, found.amax, found.sum, found.mean, found.finite) == (-3.0, -3.0, 3.0, -3.0, -3.0, 1)
    nothing = measure(torch.tensor([math.nan, math.inf]))
    assert (nothing.min, nothing.max, nothing.sum, nothing.mean) == (None, None, 0.0, None)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    bits=arrays_of.arrays(np.uint32, strategies.integers(0, 40)),
    cuts=strategies.lists(strategies.integers(0, 40), max_size=3),
    reverse=strategies.booleans(),
)
def test_merging_parts_in_any_order_is_measuring_the_whole(bits, cuts, reverse):
    x = torch.from_numpy(bits.view(np.float32))
    parts = [measure(part) for part in torch.tensor_split(x, sorted(cut for cut in cuts if cut <= len(x)))]
    total = TensorStatistics(exponents={})
    for part in reversed(parts) if reverse else parts:
        total = merge(total, part)
    assert_equal(total, measure(x), magnitude=float(x[x.isfinite()].double().abs().sum()))


@by_dtype
def test_json_holds_everything(dtype):
    found = measure(wild(dtype, (200,)))
    text = json.dumps(found.to_json(), allow_nan=False)
    back = TensorStatistics.from_json(json.loads(text))
    if math.isfinite(found.sum_squares) and math.isfinite(found.sum):
        assert back == found
    else:
        assert math.isnan(back.sum_squares)
    assert back.exponents == found.exponents


def test_json_of_nothing_finite():
    found = measure(torch.tensor([math.nan]))
    assert TensorStatistics.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found
