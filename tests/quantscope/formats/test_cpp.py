"""The C++ kernels, compiled for each architecture: the bits of the golden vectors, the reference and the torch backend.

What the kernels do in a way of their own is what is looked at here: vectors and what does not fill one, tiles that take
the short cut or do not, threads, stores past the cache, unaligned memory.
"""

from dataclasses import replace
from functools import cache, partial
from itertools import product
from math import prod
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from megatron.quantscope.formats import (
    FORMATS,
    Format,
    catalog,
    cpp_backend,
    fake_quantize,
    fake_quantize_both,
    quantize,
)
from megatron.quantscope.formats.reference import element_grid
from tests.golden import make_fp8
from tests.quantscope.formats.any_bits import DTYPES, any_rows

ELEMENTS = (catalog.E4M3, catalog.E5M2, catalog.E2M3, catalog.E3M2, catalog.E2M1)
UNSCALED = (*ELEMENTS, FORMATS["hifp8"], FORMATS["bf16"], FORMATS["fp16"])
BLOCKED = [name for name, fmt in FORMATS.items() if fmt.block]
BLOCK_FILES = {
    "mxfp8": "mxfp8_e4m3_block32",
    "mxfp8_e5m2": "mxfp8_e5m2_block32",
    "mxfp6_e2m3": "mxfp6_e2m3_block32",
    "mxfp6_e3m2": "mxfp6_e3m2_block32",
    "mxfp4": "mxfp4_block32",
}
pytestmark = pytest.mark.usefixtures("architecture")
TILE_BLOCKS = 32

cpp = partial(fake_quantize, backend="cpp")
by_torch = partial(fake_quantize, backend="torch")
by_unscaled = pytest.mark.parametrize("fmt", UNSCALED, ids=lambda fmt: fmt.name)
by_name = pytest.mark.parametrize("name", FORMATS)
by_blocked = pytest.mark.parametrize("name", BLOCKED)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_fast_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
any_example = hypothesis.settings(
    deadline=None, max_examples=40, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Gaussian, block after block of another magnitude, within the range of fp16."""
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=numbers)
    return (x * torch.exp2(4 * torch.randn(x.shape[:-1], generator=numbers)).unsqueeze(-1)).to(dtype)


def representable(vectors: dict[str, np.ndarray], dtype: torch.dtype) -> tuple[Tensor, Tensor, np.ndarray]:
    """(x, y, rows): the rows of golden vectors whose x `dtype` holds, in that dtype, which may round y once more."""
    x = torch.from_numpy(vectors["x"])
    same = (x.to(dtype).float() == x) | x.isnan()
    rows = same.reshape(len(x), -1).all(dim=1)
    y = torch.from_numpy(vectors["y" if "y" in vectors else "y_sat"])
    return x[rows].to(dtype), y[rows].to(dtype), rows.numpy()


@by_dtype
@pytest.mark.parametrize("fmt", [*ELEMENTS, FORMATS["hifp8"]], ids=lambda fmt: fmt.name)
def test_elements_are_golden(fmt, dtype, golden, assert_same_bits):
    x, y, _ = representable(golden("hif8_round" if fmt.is_tapered else f"elem_{fmt.name}"), dtype)
    assert len(x) > 200
    assert_same_bits(cpp(x, fmt), y)


@by_dtype
@pytest.mark.parametrize("name", BLOCK_FILES)
def test_blocks_are_golden_along_and_across_memory(name, dtype, golden, assert_same_bits):
    vectors = golden(BLOCK_FILES[name])
    x, y, rows = representable(vectors, dtype)
    assert len(x) >= 5
    expected = {"floor": y}
    if "y_rceil" in vectors:
        expected["rceil"] = torch.from_numpy(vectors["y_rceil"][rows]).to(dtype)
    across = x.t().contiguous()
    for scale_rule, wanted in expected.items():
        assert_same_bits(cpp(x, name, scale_rule=scale_rule), wanted)
        assert_same_bits(cpp(across, name, axis=0, scale_rule=scale_rule).t(), wanted)
        assert_same_bits(cpp(x.t(), name, axis=0, scale_rule=scale_rule).t(), wanted)


def test_nvfp4_is_golden_along_and_across_memory(golden, assert_same_bits):
    vectors = golden("nvfp4_block16")
    for x, y in zip(torch.from_numpy(vectors["x"]), vectors["y"], strict=True):
        assert_same_bits(cpp(x, "nvfp4"), y)
        assert_same_bits(cpp(x.t().contiguous(), "nvfp4", axis=0).t(), y)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_is_golden(name, assert_same_bits):
    with np.load(Path(make_fp8.__file__).parent / f"{name}_tensor.npz") as arrays:
        vectors = dict(arrays)
    for x, y in zip(torch.from_numpy(vectors["x"]), vectors["y"], strict=True):
        assert_same_bits(cpp(x, name), y)


@cache
def reference_of_every_pattern(fmt: Format, dtype: torch.dtype, saturate: bool | None) -> Tensor:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    return fake_quantize(x, fmt, saturate=saturate, backend="reference")


@pytest.mark.parametrize("saturate", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@by_unscaled
def test_every_16_bit_input_agrees_with_the_reference(fmt, dtype, saturate, every_pattern, assert_same_bits):
    if saturate is False and not (fmt.has_inf or fmt.has_nan):
        with pytest.raises(ValueError, match="saturate=False is not allowed"):
            cpp(torch.ones(1), fmt, saturate=False)
        return
    x, expected = every_pattern(dtype), reference_of_every_pattern(fmt, dtype, saturate)
    assert_same_bits(cpp(x, fmt, saturate=saturate), expected)
    if dtype == torch.bfloat16 and fmt.name != "bf16":  # of float32 the kernels are others
        assert_same_bits(cpp(x.float(), fmt, saturate=saturate).to(dtype), expected)


@pytest.mark.parametrize("scale", [None, "e8m0"])
@pytest.mark.parametrize("fmt", ELEMENTS, ids=lambda fmt: fmt.name)
def test_float64_beside_a_tie_is_rounded_once(fmt, scale, assert_same_bits):
    """By way of the nearest float32 it would be the tie."""
    values = torch.tensor(element_grid(fmt), dtype=torch.float64)
    ties = (values[1:] + values[:-1]) / 2
    beside = torch.cat([ties * (1 + 2.0**-40), ties * (1 - 2.0**-40)])
    assert torch.equal(beside.float().double(), ties.repeat(2))
    scaled = replace(fmt, name="scaled", block=32, scale=scale) if scale else fmt
    blocks = torch.nn.functional.pad(beside, (0, -len(beside) % 31)).view(-1, 31)
    x = torch.cat([torch.full((len(blocks), 1), fmt.max), blocks], dim=1)  # so that the scale is 1
    expected = fake_quantize(beside, fmt, backend="reference")
    for axis, layout in ((1, x), (0, x.t().contiguous())):
        found = cpp(layout, scaled, axis=axis)
        assert_same_bits((found if axis else found.t())[:, 1:].flatten()[: len(beside)], expected)


@strategies.composite
def any_tensors(draw: strategies.DrawFn, dtype: torch.dtype) -> Tensor:
    """[outer, length, inner] of any bits, again and again: whole vectors and tiles, and what is left beside them."""
    bits = draw(any_rows(dtype)).flatten()
    lengths, widths = strategies.integers(1, 100), strategies.sampled_from([1, 2, 15, 16, 33, 64, 130, 300])
    shape = draw(strategies.tuples(strategies.integers(1, 2), lengths, widths))
    return bits.repeat(-(-prod(shape) // len(bits)))[: prod(shape)].view(shape)


@by_dtype
@any_example
@hypothesis.given(
    data=strategies.data(),
    fmt=strategies.sampled_from([*ELEMENTS, *FORMATS.values()]),
    scale_rule=strategies.sampled_from(["floor", "rceil"]),
    saturate=strategies.sampled_from([None, True, False]),
    axis=strategies.sampled_from([0, 1, 2]),
)
def test_any_bits_give_those_of_the_torch_backend(data, dtype, fmt, scale_rule, saturate, axis, assert_same_bits):
    x = data.draw(any_tensors(dtype))
    if not (fmt.has_inf or fmt.has_nan):
        saturate = None
    options = {"axis": axis, "scale_rule": scale_rule, "saturate": saturate}
    assert_same_bits(cpp(x, fmt, **options), by_torch(x, fmt, **options))


@by_dtype
@any_example
@hypothesis.given(
    data=strategies.data(),
    name=strategies.sampled_from([name for name, fmt in FORMATS.items() if fmt.bits <= 8]),
    scale_rule=strategies.sampled_from(["floor", "rceil"]),
    axis=strategies.sampled_from([0, 1, 2]),
)
def test_codes_and_scales_are_those_of_the_torch_backend(data, dtype, name, scale_rule, axis):
    x = data.draw(any_tensors(dtype))
    x[x.isnan()] = torch.nan  # torch drops the sign of an fp16 NaN where it widens it
    found, expected = (
        quantize(x, name, axis=axis, scale_rule=scale_rule, backend=backend) for backend in ("cpp", "torch")
    )
    assert torch.equal(found.codes, expected.codes)
    assert (found.scales is None) == (expected.scales is None)
    assert found.scales is None or torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize(
    ("name", "dtype", "scale_rule"),
    [
        ("mxfp8", torch.bfloat16, "floor"),
        ("mxfp8_e5m2", torch.float32, "rceil"),
        ("nvfp4", torch.float32, "floor"),
        ("nvfp4", torch.bfloat16, "floor"),
        ("mxfp4", torch.float16, "floor"),
        ("hifp8", torch.bfloat16, "floor"),
        ("fp8_e4m3", torch.float32, "floor"),
    ],
    ids=str,
)
def test_every_length_and_every_width(name, dtype, scale_rule, assert_same_bits):
    """A column does not know how many there are beside it, nor do blocks know how they lie in memory."""
    most = 40
    whole = sample(2, 70, most, dtype=dtype)
    options = {"scale_rule": scale_rule, "amax": whole.abs().max()}
    for length in range(1, 71):
        expected = by_torch(whole[:, :length], name, axis=1, **options)
        for inner in range(1, most + 1):
            x = whole[:, :length, :inner].contiguous()
            wanted = expected[..., :inner]
            assert_same_bits(cpp(x, name, axis=1, **options), wanted)
            if inner <= 3:  # along memory the width only counts rows
                along = x.transpose(1, 2).contiguous()
                assert_same_bits(cpp(along, name, axis=2, **options), wanted.transpose(1, 2))


@by_name
@pytest.mark.parametrize("shape", [(300, 1000), (1 << 18,), (3, 45_003)], ids=str)
def test_number_of_threads_does_not_show(name, shape, assert_same_bits):
    x = sample(*shape, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    try:
        for axis in range(x.dim()):
            expected = by_torch(x, name, axis=axis)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert cpp_backend.call_for(x, axis).threads == min(threads, x.numel() >> 16)
                assert_same_bits(cpp(x, name, axis=axis), expected)
    finally:
        torch.set_num_threads(before)


@by_fast_dtype
@by_name
def test_neither_streaming_nor_alignment_shows(name, dtype, monkeypatch, assert_same_bits):
    """A streaming store to an address that is not aligned would end the process."""
    monkeypatch.setattr(cpp_backend, "_STREAM_BYTES", 1)
    for shape in ((64, 256), (40, 256), (64, 250), (1, 4099)):
        values, count = sample(*shape, dtype=dtype), prod(shape)
        expected = [by_torch(values, name, axis=axis) for axis in (0, 1)]
        for x_offset, out_offset in ((0, 0), (0, 1), (1, 0), (3, 7), (8, 16)):
            x, out = (torch.zeros(count + 64, dtype=dtype)[o : o + count].view(shape) for o in (x_offset, out_offset))
            x.copy_(values)
            for axis in (0, 1):
                assert_same_bits(cpp(x, name, axis=axis, out=out), expected[axis])
            assert_same_bits(x, values)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "hifp8", "fp8_e5m2"])
@pytest.mark.parametrize("columns", [2048, 2049])
def test_results_of_8_mib_and_more(name, columns, assert_same_bits):
    x = sample(2048, columns, dtype=torch.bfloat16)
    assert x.nbytes >= cpp_backend._STREAM_BYTES
    for axis in (0, 1):
        expected = by_torch(x, name, axis=axis)
        assert_same_bits(cpp(x, name, axis=axis), expected)
        around = torch.full((x.numel() + 2,), 7.0, dtype=x.dtype)
        assert_same_bits(cpp(x, name, axis=axis, out=around[1:-1].view_as(x)), expected)
        assert around[0] == around[-1] == 7.0


@by_name
@by_dtype
def test_nothing_beside_the_result_is_written(name, dtype, assert_same_bits):
    for shape in ((5, 33), (33, 5), (64, 70), (32, 63), (63, 32), (32, 15), (32, 7), (1, 1)):
        x, margin = sample(*shape, dtype=dtype), 64
        for axis in (0, 1):
            around = torch.full((x.numel() + 2 * margin,), 7.0, dtype=dtype)
            out = around[margin:-margin].view(shape)
            assert_same_bits(cpp(x, name, axis=axis, out=out), by_torch(x, name, axis=axis))
            assert (around[:margin] == 7.0).all()
            assert (around[-margin:] == 7.0).all()


@by_name
@by_dtype
def test_in_place(name, dtype, assert_same_bits):
    for shape in ((64, 256), (33, 70), (2100,)):
        x = sample(*shape, dtype=dtype)
        for axis in range(x.dim()):
            expected = by_torch(x, name, axis=axis)
            y = x.clone()
            assert cpp(y, name, axis=axis, out=y) is y
            assert_same_bits(y, expected)


ODD_BLOCKS = {
    "zero": lambda ordinary: ordinary * 0.0,
    "tiny": lambda ordinary: ordinary.sign() * 2.0**-133,  # a subnormal of bf16
    "small": lambda ordinary: ordinary * 2.0**-122,
    "huge": lambda ordinary: ordinary.sign() * 1.9 * 2.0**127,
    "large": lambda ordinary: ordinary / ordinary.abs().max() * 2.0**120,
    "NaN": lambda ordinary: ordinary.where(ordinary != ordinary.max(), torch.nan),
    "Inf": lambda ordinary: ordinary.where(ordinary != ordinary.min(), -torch.inf),
}


@by_fast_dtype
@by_blocked
@pytest.mark.parametrize("odd", ODD_BLOCKS)
def test_one_odd_block_among_ordinary_ones_of_a_tile(name, dtype, odd, assert_same_bits):
    """Where the moved grid does not hold for one block, its whole tile goes another way, to the same bits."""
    block = FORMATS[name].block
    ordinary = torch.randn(TILE_BLOCKS, block, generator=torch.Generator().manual_seed(5))
    amax = ordinary.abs().max()  # for nvfp4: an odd block shall not change the scale of the others
    for place in range(0, TILE_BLOCKS, 3):
        x = ordinary.clone()
        x[place] = ODD_BLOCKS[odd](ordinary[place])
        x = x.to(dtype)
        for scale_rule in ("floor", "rceil"):
            options = {"scale_rule": scale_rule, "amax": amax}
            expected = by_torch(x, name, **options)
            assert_same_bits(cpp(x, name, **options), expected)
            wide = x.t().repeat(1, 8)  # a tile of columns, and more
            assert_same_bits(cpp(wide, name, axis=0, **options), expected.t().repeat(1, 8))


@by_fast_dtype
@by_blocked
def test_blocks_of_every_magnitude_side_by_side(name, dtype, assert_same_bits):
    """In the order of their exponents, and in no order: tiles that hold together, and tiles that hold all."""
    exponents = torch.arange(-149, 128, dtype=torch.float64)[:, None]
    x = torch.randn(277, FORMATS[name].block, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    x = (x.clamp(-1.9, 1.9) * torch.exp2(exponents)).to(dtype)
    shuffled = x[torch.randperm(277, generator=torch.Generator().manual_seed(7))]
    for values in (x, shuffled):
        for scale_rule in ("floor", "rceil"):
            expected = by_torch(values, name, scale_rule=scale_rule)
            assert_same_bits(cpp(values, name, scale_rule=scale_rule), expected)
            down = values.t().contiguous()
            assert_same_bits(cpp(down, name, axis=0, scale_rule=scale_rule).t(), expected)


@by_dtype
@by_name
def test_both_axes_at_once_are_two_calls(name, dtype, monkeypatch, assert_same_bits):
    shapes = ((64, 128), (32, 32), (96, 1056), (33, 64), (64, 33), (7, 5))
    for shape, scale_rule in product(shapes, ("floor", "rceil")):
        x = sample(*shape, dtype=dtype)
        x[0, 0], x[-1, -1] = 0.0, -0.0
        expected = [by_torch(x, name, axis=axis, scale_rule=scale_rule) for axis in (1, 0)]
        for stream_bytes in (8 << 20, 1):
            monkeypatch.setattr(cpp_backend, "_STREAM_BYTES", stream_bytes)
            for layout in (x, x.t().contiguous().t()):
                found = fake_quantize_both(layout, name, scale_rule=scale_rule, backend="cpp")
                for actual, wanted in zip(found, expected, strict=True):
                    assert_same_bits(actual, wanted)


def test_both_axes_at_once_of_odd_blocks_and_many_threads(assert_same_bits):
    x = sample(512, 1024, dtype=torch.bfloat16)
    x[40:70, 100:200] = 0.0
    x[80, 300], x[300, 80], x[130, 33] = torch.nan, torch.inf, 3e38
    x[200:264] *= 2.0**-125
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for actual, axis in zip(fake_quantize_both(x, "mxfp8", backend="cpp"), (1, 0), strict=True):
                assert_same_bits(actual, by_torch(x, "mxfp8", axis=axis))
    finally:
        torch.set_num_threads(before)
