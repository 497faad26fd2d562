"""`measure` in all its ways: C++ of each architecture and torch, held against plain Python with fractions, exactly."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from megatron.quantscope.formats import cpp_backend, cpp_measure, measure, measuring, merge, patterns
from megatron.quantscope.formats.backends import BACKENDS
from megatron.quantscope.formats.measuring import plain_statistics
from megatron.quantscope.formats.statistics import TensorStatistics
from tests.quantscope.formats.any_bits import DTYPES, FRACTION_BITS, any_rows
from tests.quantscope.formats.one_by_one import one_by_one

NARROW = (torch.bfloat16, torch.float16, torch.float32)
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}
UNPACKED_AFTER = {torch.bfloat16: 8 * (2**14 - 1), torch.float16: 8 * (2**11 - 1), torch.float32: 8 * (2**17 - 1)}
SWEEP, GROUP = 4096, 512  # elements, of cpp/statistics.h and cpp/sweep.h
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_narrow = pytest.mark.parametrize("dtype", NARROW, ids=str)
with_kernels = hypothesis.settings(
    deadline=None, max_examples=40, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


def fields_of(dtype: torch.dtype) -> int:
    """How many exponent fields there are; the last one is that of Inf and NaN."""
    return 1 << (8 * dtype.itemsize - 1 - FRACTION_BITS[dtype])


def from_bits(sign: Tensor, field: Tensor, fraction: Tensor, dtype: torch.dtype) -> Tensor:
    bits = sign.long() << (8 * dtype.itemsize - 1) | field.long() << FRACTION_BITS[dtype] | fraction.long()
    return bits.to(INTEGER[dtype.itemsize]).view(dtype)


def random_bits(dtype: torch.dtype, count: int, fields: tuple[int, int] | None = None, seed: int = 0) -> Tensor:
    """Any signs and fractions, and exponent fields from a range, end excluded; None: all but that of Inf and NaN."""
    numbers = torch.Generator().manual_seed(seed)
    low, high = fields or (0, fields_of(dtype) - 1)
    ends = ((0, 2), (low, high), (0, 1 << FRACTION_BITS[dtype]))
    return from_bits(*(torch.randint(*end, (count,), generator=numbers) for end in ends), dtype)


def of_few_values(dtype: torch.dtype, count: int, **options: tuple[int, int] | int) -> Tensor:
    """Random, but of no more than 999 values, so that plain Python is soon done with them."""
    values = random_bits(dtype, 999, **options)
    return values[torch.randint(0, 999, (count,), generator=torch.Generator().manual_seed(1))]


def middle(dtype: torch.dtype) -> int:
    return fields_of(dtype) // 2


def equal_of_all_digits(dtype: torch.dtype) -> Tensor:
    """What fills the packed sums of a table quickest."""
    size = torch.Size([2 * UNPACKED_AFTER[dtype] + 777])
    one = torch.ones((), dtype=torch.int64)
    return from_bits(one, one * middle(dtype), one * ((1 << FRACTION_BITS[dtype]) - 1), dtype).expand(size).clone()


def long_and_ordinary(dtype: torch.dtype) -> Tensor:
    return of_few_values(dtype, 2 * UNPACKED_AFTER[dtype] + 777, fields=(middle(dtype) - 8, middle(dtype)))


def mostly_left_out(dtype: torch.dtype) -> Tensor:
    """One large element every 1000, and the others up to twice sixteen binades below it."""
    top = fields_of(dtype) - 2
    x = of_few_values(dtype, UNPACKED_AFTER[torch.bfloat16] + 30_000, fields=(max(0, top - 40), max(1, top - 16)))
    x[::1000] = random_bits(dtype, 1, fields=(top, top + 1))
    return x


def equal_far_below(dtype: torch.dtype) -> Tensor:
    """The same, and all that is left out goes to one place of the tables."""
    x = equal_of_all_digits(dtype)
    x[::1000] = random_bits(dtype, 1, fields=(fields_of(dtype) - 2, fields_of(dtype) - 1))
    return x


def with_one(odd: float) -> Callable[[torch.dtype], Tensor]:
    def make(dtype: torch.dtype) -> Tensor:
        x = of_few_values(dtype, 5 * GROUP + 3, fields=(middle(dtype) - 5, middle(dtype)))
        x[1234] = odd
        return x

    return make


def falling(dtype: torch.dtype) -> Tensor:
    """Every sweep leaves the same share to the next: binades from the largest to the smallest, over and over."""
    fields = torch.arange(20_000) % (fields_of(dtype) - 1)
    numbers = torch.Generator().manual_seed(4)
    fractions = torch.randint(0, 1 << FRACTION_BITS[dtype], (8,), generator=numbers)
    return from_bits(fields % 2, fields, fractions[fields % 8], dtype)


def few_far_below(dtype: torch.dtype) -> Tensor:
    """What one sweep leaves out is little, but of many it makes a sweep that leaves something out itself."""
    x = of_few_values(dtype, 60_000, fields=(fields_of(dtype) - 4, fields_of(dtype) - 1))
    far = of_few_values(dtype, 60_000, fields=(0, fields_of(dtype) - 1))
    return torch.where(torch.arange(60_000) % 9 == 0, far, x)


def mostly_not_finite(dtype: torch.dtype) -> Tensor:
    """And whole vectors of zeros."""
    x = of_few_values(dtype, 30_000, fields=(3, 28))
    x[torch.arange(30_000) % 5 < 3] = -math.inf
    x[::77] = math.nan
    x[10_000:15_000] = 0.0
    return x


def bits_of_all_kinds(dtype: torch.dtype) -> Tensor:
    x = random_bits(dtype, 3000, fields=(0, fields_of(dtype)))
    x[:6] = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, torch.finfo(dtype).smallest_normal / 2])
    return x


CASES: dict[str, Callable[[torch.dtype], Tensor]] = {
    "any bits": bits_of_all_kinds,
    "finite": lambda dtype: random_bits(dtype, 3000),
    "equal, of all digits": equal_of_all_digits,
    "long": long_and_ordinary,
    "long, any exponent": lambda dtype: of_few_values(dtype, UNPACKED_AFTER[dtype] + 777),
    "mostly far below": mostly_left_out,
    "equal, far below": equal_far_below,
    "zeros": lambda dtype: random_bits(dtype, 5000, fields=(0, 1)) * 0.0,
    "a value among zeros": lambda dtype: (torch.arange(5000) == 4321).to(dtype) * -3.0,
    "NaN among finite": with_one(math.nan),
    "Inf among finite": with_one(-math.inf),
    "only NaN": lambda dtype: torch.full((700,), math.nan, dtype=dtype),
    "only Inf": lambda dtype: torch.full((700,), -math.inf, dtype=dtype),
    "subnormal": lambda dtype: random_bits(dtype, 5000, fields=(0, 1)),
    "nearly subnormal": lambda dtype: random_bits(dtype, 5000, fields=(0, 16)),
    "window ends at subnormals": lambda dtype: random_bits(dtype, 5000, fields=(0, 17)),
    "largest": lambda dtype: random_bits(dtype, 5000, fields=(fields_of(dtype) - 2, fields_of(dtype) - 1)),
    "falling": falling,
    "few far below": few_far_below,
    "mostly not finite": mostly_not_finite,
    "largest of all digits, long": lambda dtype: torch.full((70_001,), torch.finfo(dtype).max, dtype=dtype),
    "cancelling": lambda dtype: torch.cat([x := random_bits(dtype, 4096 + 512, fields=(5, 25)), -x]),
}
by_case = pytest.mark.parametrize("case", CASES)


@cache
def case_of(case: str, dtype: torch.dtype) -> tuple[Tensor, TensorStatistics]:
    x = CASES[case](dtype)
    return x, one_by_one(x)


@pytest.fixture(params=[1, 2])
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@by_narrow
@by_case
def test_cpp_finds_what_plain_python_finds(case, dtype, architecture):
    x, expected = case_of(case, dtype)
    found = measure(x)
    assert found == expected
    assert list(found.exponents) == sorted(found.exponents)


@by_narrow
@by_case
def test_torch_finds_what_plain_python_finds(case, dtype):
    x, expected = case_of(case, dtype)
    found = plain_statistics(x)
    assert found == expected
    assert list(found.exponents) == sorted(found.exponents)


def test_cases_hold_what_they_are_named_for():
    for dtype in NARROW:
        found = {case: case_of(case, dtype)[1] for case in CASES}
        assert found["any bits"].nan > 1
        assert found["any bits"].inf > 1
        assert found["NaN among finite"].nan == found["Inf among finite"].inf == 1
        assert found["zeros"].zero == 5000
        assert found["cancelling"].sum == 0 < found["cancelling"].sum_squares
        assert found["only NaN"].min is None
        assert found["long"].count > 2 * UNPACKED_AFTER[dtype]
        assert max(found["subnormal"].exponents) < math.log2(torch.finfo(dtype).smallest_normal)
        exponents = found["mostly far below"].exponents
        assert sum(n for e, n in exponents.items() if max(exponents) - e < 16) < 200


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_pattern_of_16_bits(dtype, every_pattern, architecture):
    x = every_pattern(dtype)
    expected = one_by_one(x)
    assert measure(x) == plain_statistics(x) == expected
    assert sum(expected.exponents.values()) + expected.zero + expected.nan + expected.inf == 1 << 16
    finite = x[x.isfinite()]  # which sweeps can take
    assert measure(finite) == one_by_one(finite)
    ascending = finite[finite.abs().argsort()]
    assert measure(ascending) == measure(finite)


@by_narrow
def test_every_length_and_alignment(dtype, architecture):
    x = random_bits(dtype, 2 * SWEEP + 700, fields=(4, 28))
    lengths = [*range(1, 70), *(near + off for near in (GROUP, 2 * GROUP, SWEEP, 2 * SWEEP) for off in (-1, 0, 1, 33))]
    for start, length in itertools.product((0, 1, 7), lengths):
        part = x[start : start + length]
        assert measure(part) == plain_statistics(part)


@by_narrow
def test_subnormals_count_where_the_machine_flushes_them(dtype, architecture):
    x = torch.cat([random_bits(dtype, 3000, fields=(0, 2)), random_bits(dtype, 2000, fields=(12, 28))])
    expected = measure(x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine can not flush subnormals")
    try:
        found = measure(x)
    finally:
        torch.set_flush_denormal(False)
    assert found == expected


@by_narrow
def test_an_odd_element_at_every_place_of_a_vector(dtype, architecture):
    ordinary = random_bits(dtype, GROUP + 5, fields=(18, 28))
    for odd in (0.0, math.nan, math.inf, torch.finfo(dtype).smallest_normal * 0.75, -torch.finfo(dtype).max):
        for place in (*range(66), *range(GROUP - 2, GROUP + 5)):
            x = ordinary.clone()
            x[place] = odd
            assert measure(x) == plain_statistics(x)


@by_narrow
def test_number_of_threads_does_not_show(dtype, threads, architecture):
    for case in ("long", "mostly far below"):
        x = case_of(case, dtype)[0][: 1 << 17].repeat(5)[: (1 << 17) + 1001]
        assert cpp_backend.call_for(x, None).threads == threads
        assert measure(x) == one_by_one(x)


@by_narrow
@with_kernels
@hypothesis.given(data=strategies.data())
def test_any_bits_in_cpp_and_torch(data, dtype, architecture):
    x = data.draw(any_rows(dtype))
    x = x.flatten().repeat(data.draw(strategies.sampled_from([1, 2, 20, 100])))
    assert measure(x) == plain_statistics(x) == one_by_one(x)


@by_dtype
@with_kernels
@hypothesis.given(data=strategies.data())
def test_parts_in_any_order_are_the_whole(data, dtype, architecture):
    x = data.draw(any_rows(dtype)).flatten()
    cuts = sorted(data.draw(strategies.sets(strategies.integers(0, len(x)), max_size=4)))
    parts = data.draw(strategies.permutations([measure(part) for part in torch.tensor_split(x, cuts)]))
    total = TensorStatistics(exponents={})
    for part in parts:
        total = merge(total, part)
    assert total == measure(x) == one_by_one(x)
    assert list(total.exponents) == sorted(total.exponents)


def test_float64_beyond_the_range_of_its_squares():
    ends = torch.tensor([1e200, 5e-324, -5e-324, 2.0**-1023], dtype=torch.float64)
    x = torch.cat([random_bits(torch.float64, 3000), ends])
    found = measure(x)
    assert found == one_by_one(x)
    assert found.exact_squares.units is None
    assert found.exact_sum.units is not None
    assert min(found.exponents) == -1074
    small = x[x.abs() < 1e150]
    assert measure(small) == one_by_one(small)
    assert measure(small).exact_squares.units is not None


@by_dtype
def test_subnormals_are_counted_in_their_binades(dtype, architecture):
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    exponent = math.frexp(smallest)[1] - 1
    x = torch.tensor([smallest, 2 * smallest, 3 * smallest, -4 * smallest, 0.0], dtype=torch.float64).to(dtype)
    assert measure(x).exponents == {exponent: 1, exponent + 1: 2, exponent + 2: 1}


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "permuted": lambda x: x.permute(2, 0, 1),
    "dense in another order": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "every other element": lambda x: torch.stack([x, x * 2], dim=-1)[..., 0],
    "one column": lambda x: x.flatten(0, 1)[:, 2],
    "with gaps": lambda x: x[1:, ::2, 3:],
    "expanded": lambda x: x[:1].expand(5, -1, -1),
    "expanded at the end": lambda x: x[..., :1].expand(-1, -1, 7),
    "strides of no use": lambda x: x.as_strided((9, 1), (1, 100)),
    "overlapping": lambda x: x.as_strided((40, 9), (3, 1)),
    "scalar": lambda x: x[2, 3, 4],
    "of a graph": lambda x: x.clone().requires_grad_(),
}


@by_dtype
@pytest.mark.parametrize("view", VIEWS)
def test_layout_does_not_matter(view, dtype, architecture):
    x = VIEWS[view](random_bits(dtype, 8 * 9 * 5, seed=3).view(8, 9, 5))
    assert measure(x) == plain_statistics(x.detach()) == one_by_one(x)


@by_dtype
def test_chunks_do_not_show(dtype, monkeypatch):
    x = bits_of_all_kinds(dtype)
    monkeypatch.setattr(measuring, "_WIDE_CHUNK", 64)
    monkeypatch.setattr(patterns, "_COUNT_CHUNK", 64)
    assert plain_statistics(x) == one_by_one(x)


def test_the_kernels_are_used_where_they_are_and_torch_where_not(architecture, monkeypatch):
    x = random_bits(torch.bfloat16, 500)
    expected, calls = one_by_one(x), []
    by_kernels = cpp_measure.statistics_of
    monkeypatch.setattr(cpp_measure, "statistics_of", lambda x: calls.append(len(x)) or by_kernels(x))
    assert measure(x) == expected
    assert calls == [500]
    measure(x.double())
    measure(x[:0])
    without = replace(BACKENDS["cpp"], lacks=lambda: "no compiler")
    monkeypatch.setattr(measuring, "BACKENDS", {**BACKENDS, "cpp": without})
    assert measure(x) == expected
    assert calls == [500]


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    ],
    ids=str,
)
def test_other_real_dtypes(dtype):
    x = torch.tensor([1, 0, 2, 1, 64]).to(torch.float32).to(dtype)
    found = measure(x)
    assert found == one_by_one(x)
    assert found.max == (1.0 if dtype == torch.bool else 64.0)


def test_integers_are_exact_to_2_to_53():
    x = torch.tensor([2**53 - 1, 2**53 - 1, -7, 0])
    found = measure(x)
    assert found.exact_sum.units == (2**54 - 9) << 1074
    assert (found.min, found.max, found.exponents) == (-7.0, 2.0**53 - 1, {2: 1, 52: 2})


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_complex_is_refused(dtype, count):
    with pytest.raises(TypeError, match=r"^a tensor of torch.complex\d+ can not be measured: it has no real values$"):
        measure(torch.zeros(count, dtype=dtype))


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no packed dtype")
def test_packed_is_refused():
    with pytest.raises(TypeError, match=r"^a tensor of torch.float4_e2m1fn_x2 can not be measured: it has no real"):
        measure(torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32, torch.bool, torch.float8_e4m3fn], ids=str)
def test_empty_and_single(dtype, architecture):
    assert measure(torch.empty(0, 3, dtype=dtype)) == TensorStatistics(exponents={})
    single = measure(torch.tensor(1.0).to(dtype))
    assert (single.count, single.zero, single.min, single.max, single.sum) == (1, 0, 1.0, 1.0, 1.0)
    assert single.exponents == {0: 1}


def test_numbers_are_those_of_python(architecture):
    """What goes into JSON must not be a number of numpy or torch."""
    for found in (measure(bits_of_all_kinds(torch.bfloat16)), plain_statistics(bits_of_all_kinds(torch.float32))):
        assert {type(number) for number in (found.count, found.zero, found.nan, found.inf)} == {int}
        assert {type(number) for number in (found.min, found.max, found.sum, found.sum_squares)} == {float}
        assert {type(number) for pair in found.exponents.items() for number in pair} == {int}
        assert not isinstance(found.exact_sum.units, np.integer)
