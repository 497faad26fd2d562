"""Statistics by Triton against those of the CPU: on a GPU if there is one, and in Triton's interpreter otherwise."""

import itertools
import math
import os
from fractions import Fraction

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from megatron.quantscope.formats import TensorStatistics, measure, measure_blocks
from megatron.quantscope.formats.exact import UNIT_EXPONENT, ExactSum
from tests.quantscope.formats.any_bits import any_rows
from tests.quantscope.formats.one_by_one import one_by_one

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: tests/conftest.py sees to that
pytest.importorskip("triton", reason="the package triton is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

triton_statistics = pytest.importorskip("megatron.quantscope.formats.triton_statistics")
DeviceStatistics = triton_statistics.DeviceStatistics
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [(), (1,), (33,), (3, 64), (5, 31), (2, 3, 100), (70, 1), (0,), (3, 0), (0, 40)]
EXACT = ("count", "zero", "nan", "inf", "min", "max", "exponents")
ROW = 2336  # bytes, and a multiple of 16
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
with_device = hypothesis.settings(deadline=None, max_examples=12)


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Elements over many binades, zeros and all that is odd among them."""
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=numbers) * torch.exp2(10 * torch.randn(shape, generator=numbers))
    odd = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-40, -1e-44, 2.0**-126, 3e38])
    chosen = torch.randint(0, 300, shape, generator=numbers)
    return torch.where(chosen < len(odd), odd[chosen.clamp(max=len(odd) - 1)], x).to(dtype)


def value_of(total: ExactSum) -> Fraction:
    assert total.units is not None
    return Fraction(total.units, 2**-UNIT_EXPONENT)


def assert_same(found: TensorStatistics, x: Tensor) -> None:
    """The counts exactly, and the sums within the bound that is stated."""
    expected = one_by_one(x.cpu())
    for name in EXACT:
        assert getattr(found, name) == getattr(expected, name), name
    assert list(found.exponents) == sorted(found.exponents)
    finite = x.cpu().double()[x.cpu().isfinite()]
    unit = (Fraction(x.numel(), 2**21) + 40) / 2**53
    magnitudes = sum(map(Fraction, finite.abs().tolist()), Fraction())
    assert abs(value_of(found.exact_sum) - value_of(expected.exact_sum)) <= unit * magnitudes
    squares = value_of(expected.exact_squares)
    assert abs(value_of(found.exact_squares) - squares) <= unit * squares


@by_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(shape, dtype):
    x = sample(shape, dtype)
    found, fields = triton_statistics.statistics_and_blocks_of(x.to(DEVICE))
    assert_same(found, x)
    assert_same(triton_statistics.statistics_of(x.to(DEVICE)), x)
    expected = measure_blocks(x)[1]
    assert fields.device.type == DEVICE
    assert fields.shape == expected.shape
    assert fields.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_pattern_of_16_bits(dtype, every_pattern):
    x = every_pattern(dtype)
    found, fields = triton_statistics.statistics_and_blocks_of(x.to(DEVICE))
    assert_same(found, x)
    assert torch.equal(fields.cpu(), measure_blocks(x)[1])


@by_dtype
@with_device
@hypothesis.given(data=strategies.data())
def test_any_bits(data, dtype):
    x = data.draw(any_rows(dtype))
    found, fields = triton_statistics.statistics_and_blocks_of(x.to(DEVICE))
    assert_same(found, x)
    assert torch.equal(fields.cpu(), measure_blocks(x)[1])


@by_dtype
@pytest.mark.parametrize("width", [64, 100])
def test_more_tiles_than_programs(width, dtype, monkeypatch):
    """The interpreter takes few tiles at a time, so small ones stand for those of a long tensor."""
    monkeypatch.setattr(triton_statistics, "TILE", 1 << 7)
    monkeypatch.setattr(triton_statistics, "PROGRAMS", 66)
    x = sample((75, width), dtype)
    found, fields = triton_statistics.statistics_and_blocks_of(x.to(DEVICE))
    assert_same(found, x)
    assert torch.equal(fields.cpu(), measure_blocks(x)[1])


@by_dtype
@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize(
    ("view", "copied"),
    [
        (lambda x: x[:, :, :40], False),
        (lambda x: x[:, 1, :], False),
        (lambda x: x[::2, 3:4, 5:70], False),
        (lambda x: x[:, :2, :], True),
        (lambda x: x.transpose(0, 2), True),
        (lambda x: x[..., ::2], True),
        (lambda x: x[:1].expand(3, -1, -1), True),
        (lambda x: x[0, 0, 0], False),
    ],
)
def test_rows_are_read_where_they_lie(view, copied, blocks, dtype):
    x = view(sample((6, 5, 70), dtype).to(DEVICE))
    prepared, _ = triton_statistics._prepared(x, blocks)
    assert (prepared.data_ptr() != x.data_ptr()) == copied
    device = DeviceStatistics(DEVICE, 1 << 16)
    found, fields = device.add(x, blocks).read(device.transfer())
    assert_same(found, x)
    assert fields is None if not blocks else torch.equal(fields, measure_blocks(x.cpu())[1])


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.uint8, torch.int8, torch.int16], ids=str
)
def test_narrow_dtypes_are_measured_in_wider_ones(dtype):
    patterns = torch.arange(2 if dtype == torch.bool else 256)
    x = (patterns * 257 - 32768).to(dtype) if dtype == torch.int16 else patterns.to(torch.uint8).view(dtype)
    found, fields = triton_statistics.statistics_and_blocks_of(x.to(DEVICE))
    assert_same(found, x.double())
    assert torch.equal(fields.cpu(), measure_blocks(x)[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64], ids=str)
def test_other_dtypes_are_refused(dtype):
    device = DeviceStatistics(DEVICE, 1 << 16)
    with pytest.raises(TypeError, match=rf"^a tensor of {dtype} can not be measured by Triton: choose from bfloat16, "):
        device.add(torch.zeros(3, dtype=dtype, device=DEVICE))


def test_many_tensors_go_by_one_transfer():
    tensors = [sample(shape, dtype, seed=1) for shape, dtype in itertools.product(SHAPES, DTYPES)]
    device = DeviceStatistics(DEVICE, 1 << 18)
    added = [(x, device.add(x.to(DEVICE), blocks=number % 2 == 0)) for number, x in enumerate(tensors)]
    transfer = device.transfer()
    for number, (x, ticket) in enumerate(reversed(added), start=1):
        found, fields = ticket.read(transfer)
        assert_same(found, x)
        assert (fields is None) == (number % 2 == 1)
        if fields is not None:
            assert fields.device.type == "cpu"
            assert torch.equal(fields, measure_blocks(x)[1])
    assert transfer.ready()


def test_a_full_buffer_says_so_and_is_empty_after_a_transfer():
    device = DeviceStatistics(DEVICE, 2 * ROW + 16)
    x, y = (sample((3, 40), torch.bfloat16, seed) for seed in (1, 2))
    first = device.add(x.to(DEVICE), blocks=True)  # 6 bytes of map: the next begins 16 later
    second = device.add(y.to(DEVICE))
    assert first is not None
    assert second is not None
    assert device.add(x.to(DEVICE)) is None
    early = device.transfer()
    third = device.add(y.to(DEVICE), blocks=True)
    late = device.transfer()
    for ticket, transfer, expected in ((first, early, x), (second, early, y), (third, late, y)):
        assert_same(ticket.read(transfer)[0], expected)
    with pytest.raises(ValueError, match=r"^the ticket is of transfer 0, not of transfer 1$"):
        first.read(late)
    assert DeviceStatistics(DEVICE, ROW + 5).add(x.to(DEVICE), blocks=True) is None
    assert DeviceStatistics(DEVICE, ROW + 6).add(x.to(DEVICE), blocks=True) is not None
    assert DeviceStatistics(DEVICE, ROW - 1).add(x.to(DEVICE)) is None
    assert DeviceStatistics(DEVICE, 0).transfer().wait().numel() == 0


def test_what_is_changed_later_was_measured_before():
    device = DeviceStatistics(DEVICE, 1 << 16)
    x = torch.full((100,), 3.0, device=DEVICE)
    ticket = device.add(x, blocks=True)
    x.fill_(7.0)
    found, fields = ticket.read(device.transfer())
    assert (found.min, found.max, found.sum) == (3.0, 3.0, 300.0)
    assert fields.tolist() == [128] * 4


def test_what_was_read_is_ones_own():
    device = DeviceStatistics(DEVICE, 1 << 16)
    ticket = device.add(torch.ones(64, device=DEVICE), blocks=True)
    transfer = device.transfer()
    ticket.read(transfer)[1].zero_()
    assert ticket.read(transfer)[1].tolist() == [127, 127]


def test_numbers_are_those_of_python():
    found = triton_statistics.statistics_of(sample((40,), torch.float32).to(DEVICE))
    assert {type(number) for number in (found.count, found.zero, found.nan, found.inf)} == {int}
    assert {type(number) for number in (found.min, found.max, found.sum)} == {float}
    assert {type(number) for pair in found.exponents.items() for number in pair} == {int}


@pytest.mark.gpu
@by_dtype
def test_measure_takes_the_kernels(dtype, monkeypatch):
    x, calls = sample((300, 1000), dtype).cuda(), []
    launch = triton_statistics._launch
    monkeypatch.setattr(triton_statistics, "_launch", lambda *given: calls.append(1) or launch(*given))
    assert_same(measure(x), x)
    found, fields = measure_blocks(x)
    assert_same(found, x)
    assert fields.is_cuda
    assert torch.equal(fields.cpu(), measure_blocks(x.cpu())[1])
    assert len(calls) == 2
    assert measure(x[:, ::2].double()) == measure(x[:, ::2].double().cpu())


@pytest.mark.gpu
def test_a_step_of_many_streams_and_many_transfers():
    """Tensors are freed and changed right after; the buffer is written again while the last copy is on its way."""
    device, side = DeviceStatistics("cuda", 1 << 20), torch.cuda.Stream()
    expected, held = [], []
    for step in range(20):
        tickets = []
        for number in range(50):
            x = torch.full((200, 333), float(step * 100 + number), device="cuda")
            if number % 2:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    tickets.append(device.add(x, blocks=True))
                torch.cuda.current_stream().wait_stream(side)
            else:
                tickets.append(device.add(x, blocks=True))
            x.fill_(-1.0)
            expected.append(float(step * 100 + number))
        transfer = device.transfer()
        held += [(ticket, transfer) for ticket in tickets]
    for value, (ticket, transfer) in zip(expected, held, strict=True):
        found, fields = ticket.read(transfer)
        assert (found.min, found.max, found.sum) == (value, value, value * 66_600)
        assert fields.unique().numel() == 1


@pytest.mark.gpu
def test_nothing_waits_before_the_transfer_is_read():
    device = DeviceStatistics("cuda", 1 << 16)
    x = torch.randn(64, 64, device="cuda")
    device.add(x, blocks=True).read(device.transfer())  # compiled, and memory is pinned
    torch.cuda.set_sync_debug_mode("error")
    try:
        ticket = device.add(x, blocks=True)
        transfer = device.transfer()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(ticket.read(transfer)[0], x)


@pytest.mark.gpu
def test_more_than_2_to_31_elements():
    x = torch.zeros((1 << 16) + 64, 1 << 15, dtype=torch.bfloat16, device="cuda")
    x[-1, -3:] = torch.tensor([-2.0, 1.0, math.nan])
    found, fields = measure_blocks(x)
    assert (found.count, found.nan, found.min, found.max, found.sum) == (x.numel(), 1, -2.0, 1.0, -1.0)
    assert found.zero == x.numel() - 3
    assert fields[-1, -1] == 255
    assert not fields[:-1].any()


@pytest.mark.gpu
def test_the_same_tensor_gives_the_same_numbers():
    x = torch.randn(3001, 4099, device="cuda")
    first = measure(x)
    assert all(measure(x) == first for _ in range(5))
