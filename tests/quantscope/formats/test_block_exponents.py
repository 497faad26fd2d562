"""`measure_blocks` and `block_counts`: C++ of each architecture and torch, held against plain Python."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from megatron.quantscope.formats import (
    block_counts,
    block_exponents,
    cpp_backend,
    cpp_measure,
    measure,
    measure_blocks,
)
from megatron.quantscope.formats.backends import BACKENDS
from tests.quantscope.formats.any_bits import DTYPES, any_rows

NARROW = (torch.bfloat16, torch.float16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SHAPES = [(), (1,), (31,), (32,), (33,), (3, 64), (5, 31), (2, 3, 100), (7, 4096), (3, 4097), (2, 9000), (4000, 1)]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_narrow = pytest.mark.parametrize("dtype", NARROW, ids=str)
with_kernels = hypothesis.settings(
    deadline=None, max_examples=40, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


def field_of(values: list[float] | list[int]) -> int:
    """The exponent field of a block, by the definition."""
    if any(isinstance(value, float) and not math.isfinite(value) for value in values):
        return 255
    amax = max(map(abs, values))
    exponent = math.frexp(amax)[1] - 1 if isinstance(amax, float) else amax.bit_length() - 1
    return 0 if not amax or exponent < -126 else min(exponent + 127, 254)


def slow_map(x: Tensor, block: int = 32) -> Tensor:
    """A block at a time, in Python's own numbers."""
    exact = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    rows = (exact.double() if x.is_floating_point() else exact).tolist()
    fields = [
        [field_of([+number for number in row[start : start + block]]) for start in range(0, len(row), block)]
        for row in rows
    ]
    shape = (*x.shape[:-1], -(-x.shape[-1] // block)) if x.dim() else (1,)
    return torch.tensor(fields, dtype=torch.uint8).reshape(shape)


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Ordinary elements over many binades, and all that is odd among them."""
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=numbers) * torch.exp2(20 * torch.randn(shape, generator=numbers))
    odd = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-40, -1e-44, 2.0**-126, 3e38])
    chosen = torch.randint(0, 500, shape, generator=numbers)
    x = torch.where(chosen < len(odd), odd[chosen.clamp(max=len(odd) - 1)], x)
    return torch.where(torch.rand(shape[:-1] + (1,) * bool(shape), generator=numbers) < 0.2, 0.0, x).to(dtype)


def assert_measured(x: Tensor, **arguments: int) -> None:
    statistics, fields = measure_blocks(x, **arguments)
    assert statistics == measure(x)
    assert fields.dtype == torch.uint8
    assert fields.is_contiguous()
    expected = slow_map(x, **arguments)
    assert fields.shape == expected.shape
    assert fields.tolist() == expected.tolist()


@by_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(shape, dtype, architecture):
    assert_measured(sample(shape, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_pattern_of_16_bits_alone(dtype, every_pattern, architecture):
    x = every_pattern(dtype)
    assert_measured(x.view(-1, 1))
    assert_measured(x)
    in_order = x.view(-1, 32)[torch.randperm(2048, generator=torch.Generator().manual_seed(0))]
    assert_measured(in_order)


@by_narrow
@with_kernels
@hypothesis.given(data=strategies.data())
def test_any_bits(data, dtype, architecture):
    x = data.draw(any_rows(dtype))
    assert_measured(x.repeat(1, data.draw(strategies.sampled_from([1, 2, 50]))))


@by_dtype
def test_an_odd_element_at_every_place_of_a_block(dtype, architecture):
    for odd, place in itertools.product((math.nan, -math.inf, 8.0, 1e-41), range(70)):
        x = torch.zeros(2, 70, dtype=dtype) + torch.finfo(dtype).smallest_normal
        x[1, place] = odd
        assert_measured(x)


@by_narrow
def test_number_of_threads_does_not_show(dtype, architecture):
    before = torch.get_num_threads()
    try:
        for columns in (4096, 5000):
            x = sample((60, columns), dtype)
            torch.set_num_threads(1)
            expected = measure_blocks(x)
            torch.set_num_threads(2)
            assert cpp_backend.call_for(x, None).threads == 2
            found = measure_blocks(x)
            assert found[0] == expected[0]
            assert torch.equal(found[1], expected[1])
    finally:
        torch.set_num_threads(before)


@by_dtype
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 2),
        lambda x: x[:, 1:, ::2],
        lambda x: x[:1].expand(4, -1, -1),
        lambda x: x[..., :1].expand(-1, -1, 40),
        lambda x: x[0, 0, 0],
        lambda x: x.clone().requires_grad_(),
    ],
)
def test_layout_does_not_matter(view, dtype):
    assert_measured(view(sample((6, 7, 70), dtype)))


@by_dtype
def test_other_blocks(dtype):
    for block in (1, 16, 31, 64, 1000):
        assert_measured(sample((3, 130), dtype), block=block)
    with pytest.raises(ValueError, match=r"^block is 0: a block has at least one element$"):
        measure_blocks(sample((3,), dtype), block=0)


@by_dtype
def test_torch_finds_what_the_kernels_find(dtype, monkeypatch):
    without = replace(BACKENDS["cpp"], lacks=lambda: "no compiler")
    monkeypatch.setattr(block_exponents, "BACKENDS", {**BACKENDS, "cpp": without})
    monkeypatch.setattr(block_exponents.slabs, "CPU_SLAB_ELEMENTS", 200)
    monkeypatch.delattr(cpp_measure, "statistics_and_blocks_of")
    for shape in SHAPES:
        assert_measured(sample(shape, dtype))


def test_float64_by_its_own_value():
    """Not as the float32 that it would round to."""
    just_below = [math.nextafter(2.0**exponent, 0.0) for exponent in (128, 0, -126)]
    x = torch.tensor([*just_below, 1e300, 2.0**128, 2.0**-126, 1e-300], dtype=torch.float64).view(-1, 1)
    assert measure_blocks(x)[1].flatten().tolist() == [254, 126, 0, 254, 254, 1, 0]
    assert_measured(x)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_pattern_of_8_bits(dtype):
    x = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    assert measure_blocks(x.view(-1, 1))[1].flatten().tolist() == slow_map(x.double().view(-1, 1)).flatten().tolist()
    assert measure_blocks(x)[1].tolist() == slow_map(x.double()).tolist()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers(dtype):
    ends = [False, True] if dtype == torch.bool else [torch.iinfo(dtype).min, torch.iinfo(dtype).max, 0, 1, 3, 4]
    x = torch.tensor(ends, dtype=dtype)
    assert_measured(x.view(-1, 1))
    assert_measured(x.repeat(3, 11))


def test_integers_just_below_a_power_of_two():
    x = torch.tensor([[2**k - 1, -(2**k) + 1] for k in range(1, 63)]).view(-1, 1)
    assert_measured(x)
    largest = torch.tensor([[2**64 - 1], [2**63], [2**63 - 1]], dtype=torch.uint64)
    assert block_exponents._fields_of(largest.view(3, 1, 1, 1)).flatten().tolist() == [190, 190, 189]


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (0, 40)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64], ids=str)
def test_empty(shape, dtype):
    statistics, fields = measure_blocks(torch.zeros(shape, dtype=dtype))
    assert statistics.count == 0
    assert fields.shape == (*shape[:-1], -(-shape[-1] // 32))
    assert block_counts(fields) == {}


def test_complex_is_refused():
    with pytest.raises(TypeError, match=r"^a tensor of torch.complex64 can not be measured: it has no real values$"):
        measure_blocks(torch.zeros(3, dtype=torch.complex64))


def test_nothing_beside_the_map_is_written(architecture, monkeypatch):
    x = sample((5, 70), torch.bfloat16)
    room = torch.full((5 * 3 + 64,), 77, dtype=torch.uint8)
    cpp_measure.statistics_and_blocks_of(x, room[32 : 32 + 15].view(5, 3))
    assert torch.equal(room[32:47].view(5, 3), measure_blocks(x)[1])
    assert room[:32].unique().tolist() == room[47:].unique().tolist() == [77]


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(fields=strategies.lists(strategies.integers(0, 255), max_size=80))
def test_counts(fields):
    found = block_counts(torch.tensor(fields, dtype=torch.uint8).view(-1, 1))
    assert found == Counter(fields)
    assert list(found) == sorted(found)
    assert {type(number) for pair in found.items() for number in pair} <= {int}
