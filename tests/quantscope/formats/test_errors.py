"""`measure_format`: C++ of each architecture and torch, held against plain Python, and small examples by hand."""

import math
from dataclasses import replace
from functools import cache
from itertools import product

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from megatron.quantscope.formats import FORMATS, FormatStatistics, fake_quantize, measure, measure_format
from megatron.quantscope.formats.backends import BACKENDS
from megatron.quantscope.formats.statistics import TensorStatistics
from tests.quantscope.formats.any_bits import any_rows
from tests.quantscope.formats.damage_by_hand import FIGURES, by_hand
from tests.quantscope.formats.damage_samples import SAMPLES, gaussian

NARROW = (torch.bfloat16, torch.float16, torch.float32)
FLOAT32_MAX = torch.finfo(torch.float32).max
INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64, torch.uint8: torch.uint8}
SATURABLE = [name for name, fmt in FORMATS.items() if fmt.has_inf or fmt.has_nan]
TENSOR_SCALED = [name for name, fmt in FORMATS.items() if fmt.has_tensor_scale]
by_name = pytest.mark.parametrize("name", FORMATS)
by_dtype = pytest.mark.parametrize("dtype", NARROW, ids=str)
by_rule = pytest.mark.parametrize("scale_rule", ["floor", "rceil"])
by_backend = pytest.mark.parametrize("backend", ["cpp", "torch"])
any_example = hypothesis.settings(
    deadline=None, max_examples=40, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


def totals(found: FormatStatistics) -> FormatStatistics:
    return replace(found, blocks=None)


def assert_same(found: FormatStatistics, expected: FormatStatistics) -> None:
    """Equal in every field, and block by block in every bit; any NaN equals any NaN."""
    assert totals(found) == totals(expected)
    for name, dtype in FIGURES.items():
        a, b = getattr(found.blocks, name), getattr(expected.blocks, name)
        assert (a.dtype, a.shape) == (b.dtype, b.shape) == (dtype, b.shape)
        same = a.contiguous().view(INTEGER[dtype]) == b.contiguous().view(INTEGER[dtype])
        if dtype == torch.float32:
            same |= a.isnan() & b.isnan()
        assert same.all(), f"{name} of blocks: {a[~same].tolist()[:3]}, expected {b[~same].tolist()[:3]}"


@cache
def expected_of(sample: str, dtype: torch.dtype, name: str, **options: object) -> tuple[Tensor, FormatStatistics]:
    x = SAMPLES[sample](dtype)
    return x, by_hand(x, name, **options)


def check_every_option(backend: str, sample: str, dtype: torch.dtype, name: str) -> None:
    fmt = FORMATS[name]
    rules = ("floor", "rceil") if fmt.scale == "e8m0" else ("floor",)
    for axis, scale_rule, saturate in product((0, 1), rules, (None, False, True) if name in SATURABLE else (None,)):
        options = {"axis": axis, "scale_rule": scale_rule, "saturate": saturate}
        x, expected = expected_of(sample, dtype, name, **options)
        found = measure_format(x, name, blocks=True, backend=backend, **options)
        assert_same(found, expected)
        assert measure_format(x, name, backend=backend, **options) == totals(found)


@by_dtype
@by_name
@pytest.mark.parametrize("sample", SAMPLES)
def test_cpp_finds_what_plain_python_finds(sample, name, dtype, architecture):
    check_every_option("cpp", sample, dtype, name)


@by_dtype
@by_name
@pytest.mark.parametrize("sample", SAMPLES)
def test_torch_finds_what_plain_python_finds(sample, name, dtype):
    check_every_option("torch", sample, dtype, name)


def test_samples_suffer_all_there_is():
    found = [
        expected_of(sample, torch.float32, name, axis=1, scale_rule="floor", saturate=None)[1]
        for sample, name in product(SAMPLES, FORMATS)
    ]
    for damage in ("underflow", "saturated", "lost"):
        assert sum(getattr(statistics, damage) > 0 for statistics in found) >= 3, damage
    assert any((statistics.blocks.lost[:, -1] > 0).any() for statistics in found)  # a short last block


SHAPES = ((33, 5), (64, 256), (40, 70), (2, 45, 33), (3, 4097), (5000,), (7,), (35, 1100), (1, 1, 9000))


@by_dtype
@by_name
def test_cpp_is_torch_in_every_shape(name, dtype, architecture):
    """Tiles of rows that are whole or not, several at a time, columns beyond one strip, and the widths of vectors."""
    for shape in SHAPES:
        x = gaussian(*shape, dtype=dtype)
        x.view(-1)[2] = math.nan if len(shape) > 1 else -1.0
        x.view(-1)[-3] = math.inf if shape[-1] % 2 else 1.0
        for axis in range(len(shape)):
            found, expected = (measure_format(x, name, axis=axis, blocks=True, backend=b) for b in ("cpp", "torch"))
            assert_same(found, expected)
            assert measure_format(x, name, axis=axis, backend="cpp") == totals(expected)


@by_dtype
@any_example
@hypothesis.given(
    data=strategies.data(),
    name=strategies.sampled_from(list(FORMATS)),
    axis=strategies.sampled_from([0, 1]),
    scale_rule=strategies.sampled_from(["floor", "rceil"]),
    saturate=strategies.sampled_from([None, True, False]),
)
def test_cpp_is_torch_for_any_bits(data, dtype, name, axis, scale_rule, saturate, architecture):
    x = data.draw(any_rows(dtype)).repeat(*data.draw(strategies.sampled_from([(1, 1), (20, 1), (3, 40)])))
    options = {"axis": axis, "scale_rule": scale_rule, "saturate": saturate if name in SATURABLE else None}
    found, expected = (measure_format(x, name, blocks=True, backend=backend, **options) for backend in ("cpp", "torch"))
    assert_same(found, expected)
    for backend in ("cpp", "torch"):
        assert measure_format(x, name, backend=backend, **options) == totals(expected)
    assert found.tensor == measure(x)


@by_rule
@by_name
def test_blocks_whose_values_come_to_2_to_128(name, scale_rule, architecture):
    """Rounded up, they leave float32: lost, also where nobody asks for blocks."""
    for largest in (FLOAT32_MAX, 3.3895e38, 1.95 * 2.0**127, 1.76 * 2.0**127, 1.1 * 2.0**127):
        x = torch.full((2, 40), largest)
        x[:, 3], x[1, 7] = 1e30, -largest
        after = fake_quantize(x, name, scale_rule=scale_rule, backend="reference")
        expected = by_hand(x, name, scale_rule=scale_rule)
        assert expected.lost == int(after.isinf().sum())
        for backend, blocks in product(("cpp", "torch"), (False, True)):
            found = measure_format(x, name, scale_rule=scale_rule, blocks=blocks, backend=backend)
            assert totals(found) == totals(expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "hifp8", "fp8_e4m3", "bf16"])
def test_number_of_threads_does_not_show(name, threads, architecture):
    x = gaussian(500, 301, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for axis in (0, 1):
            found = measure_format(x, name, axis=axis, blocks=True, backend="cpp")
            assert_same(found, measure_format(x, name, axis=axis, blocks=True, backend="torch"))
    finally:
        torch.set_num_threads(before)


@by_name
@by_backend
def test_layout_does_not_matter(backend, name, architecture):
    x = gaussian(6, 10, 40).transpose(0, 1).contiguous()
    views = {
        "transposed": x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "every other": torch.stack([x, x * 3], dim=-1)[..., 0],
        "with gaps": torch.nn.functional.pad(x, (1, 2, 3, 4))[:, 3:-4, 1:-2],
        "of a graph": x.clone().requires_grad_(),
    }
    for axis in (0, 1, 2):
        expected = measure_format(x, name, axis=axis, blocks=True, backend="torch")
        for view in views.values():
            assert_same(measure_format(view, name, axis=axis, blocks=True, backend=backend), expected)
            assert measure_format(view, name, axis=axis - 3, backend=backend) == totals(expected)


@by_name
@by_backend
def test_empty(backend, name, architecture):
    for shape, axis, blocks_shape in (((0,), 0, (0,)), ((0, 5), 0, (0, 5)), ((3, 0), 0, (1, 0)), ((0, 5), 1, (0, 1))):
        found = measure_format(torch.empty(shape), name, axis=axis, blocks=True, backend=backend)
        assert totals(found) == FormatStatistics(tensor=TensorStatistics(exponents={}))
        assert math.isnan(found.sqnr_db)
        for figure, dtype in FIGURES.items():
            assert getattr(found.blocks, figure).dtype == dtype
            assert tuple(getattr(found.blocks, figure).shape) == blocks_shape


@by_name
@by_backend
def test_scalar(backend, name, architecture):
    for number in (0.3, math.nan, 0.0, 1e9):
        found = measure_format(torch.tensor(number), name, blocks=True, backend=backend)
        assert_same(found, by_hand(torch.tensor([number]), name))
        assert measure_format(torch.tensor(number), name, axis=0, backend=backend) == totals(found)


@by_name
def test_float64_goes_through_float32(name):
    x = gaussian(5, 70)
    expected = measure_format(x, name, axis=0, blocks=True)
    assert_same(measure_format(x.double(), name, axis=0, blocks=True), expected)
    x = torch.tensor([1.0 + 2.0**-40, 0.0, 3.0], dtype=torch.float64)
    found = measure_format(x, name)
    assert found.tensor == measure(x)
    assert found.underflow == found.saturated == found.lost == 0


@pytest.mark.parametrize("backend", ["auto", "cpp", "torch"])
@by_dtype
def test_rows_add_up_to_their_matrix(backend, dtype):
    if backend == "cpp" and (reason := BACKENDS["cpp"].lacks()):
        pytest.skip(reason)
    x = gaussian(4, 64, dtype=dtype)
    total = FormatStatistics(tensor=TensorStatistics(exponents={}))
    for row in x:
        total += measure_format(row, "mxfp4", blocks=True, backend=backend)
    assert total == measure_format(x, "mxfp4", backend=backend)
    assert total.blocks is None


@by_dtype
@any_example
@hypothesis.given(
    data=strategies.data(), name=strategies.sampled_from(list(FORMATS)), axis=strategies.sampled_from([0, 1])
)
def test_parts_in_any_order_are_the_whole(data, dtype, name, axis, architecture):
    """Parts along the other axis, which leaves blocks whole; a scale of the tensor has to be that of the whole."""
    x = data.draw(any_rows(dtype))
    x = x.repeat(4, 1) if axis else x.repeat(1, 4).t()
    cuts = sorted(data.draw(strategies.sets(strategies.integers(0, x.shape[1 - axis]), max_size=3)))
    backends = strategies.sampled_from(["cpp", "torch"])
    options = {"axis": axis, "amax": x.abs().max()}
    parts = [
        measure_format(part, name, backend=data.draw(backends), blocks=data.draw(strategies.booleans()), **options)
        for part in torch.tensor_split(x, cuts, dim=1 - axis)
    ]
    total = FormatStatistics(tensor=TensorStatistics(exponents={}))
    for part in data.draw(strategies.permutations(parts)):
        total = total + part
    assert total == measure_format(x, name, **options)
    assert total == measure_format(x, name, axis=axis)  # its own amax is the one that was given


@by_backend
@pytest.mark.parametrize(
    ("scale_rule", "after", "saturated"),
    [("floor", [448.0, 1.0, 0.0, -448.0, 0.0], 2), ("rceil", [480.0, 1.0, 0.0, -480.0, 0.0], 0)],
)
def test_mxfp8_by_hand(backend, scale_rule, after, saturated, architecture):
    """amax 480: floor takes the scale 1, which ends at 448; rceil takes 2. 2^-10 ties with zero, the even one."""
    x = torch.tensor([480.0, 1.0, 2.0**-10, -480.0, 0.0])
    assert fake_quantize(x, "mxfp8", scale_rule=scale_rule).tolist() == after
    found = measure_format(x, "mxfp8", scale_rule=scale_rule, blocks=True, backend=backend)
    error = saturated * 32.0**2 + 2.0**-20
    assert (found.underflow, found.saturated, found.lost, found.error_squares) == (1, saturated, 0, error)
    assert found.sqnr_db == pytest.approx(10 * math.log10((2 * 480**2 + 1 + 2.0**-20) / error), rel=1e-12)
    figures = {figure: getattr(found.blocks, figure).tolist() for figure in FIGURES}
    assert figures == {
        "amax": [480.0],
        "error": [error],
        "signal": [2 * 480**2 + 1 + 2.0**-20],
        "underflow": [1],
        "saturated": [saturated],
        "lost": [0],
    }


@by_backend
@pytest.mark.parametrize(("saturate", "saturated", "lost"), [(None, 1, 2), (False, 1, 2), (True, 3, 0)])
def test_hifp8_by_hand(backend, saturate, saturated, lost, architecture):
    """40960 is half way from 2^15 to the next value there is none of; 2^-23 half way to the smallest, and goes up."""
    x = torch.tensor([40960.0, -1e6, 39000.0, 32768.0, 2.0**-23, -(2.0**-24), 0.0, math.inf, math.nan])
    found = measure_format(x, "hifp8", saturate=saturate, backend=backend)
    assert (found.underflow, found.saturated, found.lost) == (1, saturated, lost)
    error = (39000.0 - 2**15) ** 2 + 2.0**-46 + 2.0**-48
    if saturate:
        error += (40960.0 - 2**15) ** 2 + (1e6 - 2**15) ** 2
    assert found.error_squares == pytest.approx(error, rel=1e-15)
    assert (found.sqnr_db == -math.inf) == (lost > 0)
    assert (found.tensor.inf, found.tensor.nan) == (1, 1)


@by_backend
@by_dtype
@pytest.mark.parametrize("name", TENSOR_SCALED)
def test_amax_itself_does_not_saturate(name, dtype, backend, architecture):
    """Its scale is rounded, and may put it a little above max."""
    for seed in range(100):
        x = torch.randn(16, generator=torch.Generator().manual_seed(seed)).to(dtype)
        found = measure_format(x, name, backend=backend)
        assert (found.saturated, found.lost) == (0, 0)


@by_backend
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "nvfp4"])
def test_a_given_amax_that_is_too_small_saturates(name, backend, architecture):
    x = torch.tensor([1.0, -4.0, 2.0, 0.5, -2.5, 1e-30, 0.0, 3.0])
    found = measure_format(x, name, amax=torch.tensor(2.0), blocks=True, backend=backend)
    assert_same(found, by_hand(x, name, amax=torch.tensor(2.0)))
    assert (found.saturated, found.underflow) == (3, 1)
    if name.startswith("fp8"):
        assert measure_format(x, name, amax=torch.tensor(2.0), saturate=False, backend=backend).lost == 3
        assert found.error_squares == pytest.approx(2.0**2 + 0.5**2 + 1.0**2, rel=1e-3)


@by_backend
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_padding_is_not_lost(odd, backend, architecture):
    """Of a row of 70 the last block has 6 elements: what a NaN or Inf takes with it are the other 5."""
    for name, place in product(("mxfp4", "mxfp8"), (0, 40, 64, 69)):
        x = gaussian(3, 70, seed=4)
        x[1, place] = odd
        for axis, y in ((1, x), (0, x.t().contiguous()), (0, x.t())):
            found = measure_format(y, name, axis=axis, blocks=True, backend=backend)
            block = place // 32
            assert found.lost == (5 if block == 2 else 31)
            losses = found.blocks.lost if axis else found.blocks.lost.t()
            assert losses[1, block] == found.lost
            assert losses.sum() == found.lost
            assert found.sqnr_db == -math.inf


@by_backend
@by_name
def test_signal_to_noise_where_nothing_changes(name, backend, architecture):
    same = torch.tensor([1.0, -0.5, 0.0, 1.0])
    assert measure_format(same, name, backend=backend).error_squares == 0 or FORMATS[name].has_tensor_scale
    zeros = measure_format(torch.zeros(40), name, backend=backend)
    assert math.isnan(zeros.sqnr_db)
    assert (zeros.underflow, zeros.saturated, zeros.lost, zeros.tensor.zero) == (0, 0, 0, 40)
    assert measure_format(same, "bf16", backend=backend).sqnr_db == math.inf


BAD = {
    "format": ({"fmt": "fp3"}, ValueError, "unknown number format 'fp3': choose from bf16, "),
    "axis": ({"axis": 2}, ValueError, "axis 2 is not allowed for 2 dimensions: choose -2 to 1"),
    "scale rule": ({"scale_rule": "up"}, ValueError, "unknown scale rule 'up': choose from floor, rceil"),
    "saturate": ({"fmt": "mxfp4", "saturate": False}, ValueError, "saturate=False is not allowed for mxfp4: "),
    "backend": ({"backend": "triton"}, ValueError, "backend 'triton' does not measure: choose auto, cpp or torch"),
    "dtype": ({"x": torch.ones(3, 4, dtype=torch.int32)}, TypeError, "a tensor of torch.int32 can not be quantised: "),
    "float64 in C++": (
        {"x": torch.ones(3, 4, dtype=torch.float64), "backend": "cpp"},
        ValueError,
        "backend 'cpp' can not measure torch.float64 on cpu",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_arguments_in_one_line(bad, architecture):
    changed, kind, message = BAD[bad]
    arguments = {"x": torch.ones(3, 4), "fmt": "mxfp8"} | changed
    with pytest.raises(kind) as caught:
        measure_format(arguments.pop("x"), arguments.pop("fmt"), **arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
