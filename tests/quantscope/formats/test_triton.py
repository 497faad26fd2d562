"""The Triton backend against golden vectors, the torch backend and the reference: on a GPU if there is one, and in
Triton's interpreter otherwise, which runs the same kernels on CPU tensors.
"""

import os
from dataclasses import replace

import en_dtypes
import hypothesis
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from megatron.quantscope.formats import FORMATS, Band, Format, catalog, fake_quantize, quantize
from megatron.quantscope.formats.dispatch import fake_quantize_both
from tests.quantscope.formats.any_bits import any_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: tests/conftest.py sees to that
triton = pytest.importorskip("triton", reason="the package triton is not installed")
# In the interpreter numpy computes: it warns of what is meant to overflow or to be NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OCP_ELEMENTS = [catalog.E4M3, catalog.E5M2, catalog.E2M3, catalog.E3M2, catalog.E2M1]
ELEMENTS = [*OCP_ELEMENTS, FORMATS["hifp8"], FORMATS["bf16"], FORMATS["fp16"]]
OVERFLOWS = [
    (fmt, saturate) for fmt in ELEMENTS for saturate in (True, False) if saturate or fmt.has_inf or fmt.has_nan
]
GOLDEN_BLOCKS = {
    "mxfp8": "mxfp8_e4m3_block32",
    "mxfp8_e5m2": "mxfp8_e5m2_block32",
    "mxfp6_e2m3": "mxfp6_e2m3_block32",
    "mxfp6_e3m2": "mxfp6_e3m2_block32",
    "mxfp4": "mxfp4_block32",
}
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
BLOCKED = [name for name, fmt in FORMATS.items() if fmt.block]
PER_TENSOR = [name for name, fmt in FORMATS.items() if fmt.has_tensor_scale]
PATTERN_STRIDE = 65_521  # prime: 65,551 of all float32 patterns
by_name = pytest.mark.parametrize("name", FORMATS)
by_block_format = pytest.mark.parametrize("name", BLOCKED)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_overflow = pytest.mark.parametrize(
    ("fmt", "saturate"), OVERFLOWS, ids=lambda value: getattr(value, "name", str(value))
)


@pytest.fixture(autouse=True, scope="module")
def interpreted():
    """Fail with the reason if triton was imported too early for its interpreter."""
    is_interpreter = type(triton.language.max).__name__ == "InterpretedFunction"
    assert is_interpreter == (DEVICE == "cpu"), "triton was imported before TRITON_INTERPRET was set"


@pytest.fixture
def device_tiles(monkeypatch):
    """The tiles of a GPU, of which the interpreter would otherwise take many at a time."""
    from megatron.quantscope.formats import triton_backend

    monkeypatch.setattr(triton_backend, "TILE", 1 << 11)


def run(x: Tensor, fmt: object, **arguments: object) -> Tensor:
    return fake_quantize(x.to(DEVICE), fmt, backend="triton", **arguments).cpu()


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=numbers) * torch.exp2(4 * torch.randn(shape, generator=numbers))).to(dtype)


@pytest.mark.parametrize("fmt", OCP_ELEMENTS, ids=lambda fmt: fmt.name)
def test_elements_are_golden(fmt, golden, assert_same_bits):
    arrays = golden(f"elem_{fmt.name}")
    assert_same_bits(run(torch.from_numpy(arrays["x"]), fmt), arrays["y_sat"])


def test_hif8_is_golden(golden, assert_same_bits):
    arrays = golden("hif8_round")
    assert_same_bits(run(torch.from_numpy(arrays["x"]), "hifp8"), arrays["y"])


@pytest.mark.parametrize("name", GOLDEN_BLOCKS)
def test_block_scales_are_golden_along_both_axes(name, golden, assert_same_bits):
    vectors = golden(GOLDEN_BLOCKS[name])
    x, y = torch.from_numpy(vectors["x"]), torch.from_numpy(vectors["y"])
    down_columns = x.t().contiguous()
    assert_same_bits(run(x, name), y)
    assert_same_bits(run(down_columns, name, axis=0).t(), y)
    if "y_rceil" in vectors:
        assert_same_bits(run(x, name, scale_rule="rceil"), vectors["y_rceil"])
        assert_same_bits(run(down_columns, name, axis=0, scale_rule="rceil").t(), vectors["y_rceil"])


@pytest.mark.parametrize("name", GOLDEN_BLOCKS)
def test_block_scales_of_bf16_are_golden(name, golden, assert_same_bits):
    vectors = golden(GOLDEN_BLOCKS[name])
    is_bf16 = ((vectors["x"].view(np.uint32) & 0xFFFF) == 0).all(axis=1)
    x, y = (torch.from_numpy(vectors[key][is_bf16]).bfloat16() for key in ("x", "y"))
    assert len(x) > 20
    assert_same_bits(run(x, name), y)
    assert_same_bits(run(x.t().contiguous(), name, axis=0).t(), y)


def test_nvfp4_is_golden(golden, assert_same_bits):
    vectors = golden("nvfp4_block16")
    for x, y in zip(vectors["x"][::2], vectors["y"][::2], strict=True):
        assert_same_bits(run(torch.from_numpy(x), "nvfp4"), y)
        assert_same_bits(run(torch.from_numpy(x.T.copy()), "nvfp4", axis=0).t(), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@by_overflow
def test_every_16_bit_input(fmt, saturate, dtype, every_pattern, assert_same_bits):
    x = every_pattern(dtype)
    assert_same_bits(run(x, fmt, saturate=saturate), fake_quantize(x, fmt, saturate=saturate, backend="torch"))


@by_overflow
def test_float32_inputs_of_every_magnitude(fmt, saturate, assert_same_bits):
    """And the ends of every run of 2^16 patterns that share the upper half: ties of bf16 and their neighbours."""
    halves = np.arange(1 << 16, dtype=np.uint32) << 16
    edges = [halves + offset for offset in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    spread = np.arange(0, 1 << 32, PATTERN_STRIDE).astype(np.uint32)
    x = torch.from_numpy(np.concatenate([spread, *edges]).view(np.float32))
    assert_same_bits(run(x, fmt, saturate=saturate), fake_quantize(x, fmt, saturate=saturate, backend="torch"))


@by_dtype
@by_name
def test_every_axis_of_every_layout(name, dtype, assert_same_bits):
    """Ragged, of one element, permuted: [outer, length, inner] of all kinds."""
    for shape in ((3, 33, 18), (5, 70), (1, 7), (130, 1)):
        x = sample(*shape, dtype=dtype)
        for layout in (x, x.transpose(0, -1)):
            for axis in range(x.dim()):
                expected = fake_quantize(layout, name, axis=axis, backend="torch")
                assert_same_bits(run(layout, name, axis=axis), expected)


@pytest.mark.usefixtures("device_tiles")
@by_dtype
@pytest.mark.parametrize(
    ("name", "scale_rule"),
    [
        ("mxfp8", "floor"),
        ("nvfp4", "floor"),
        *(pytest.param(name, rule, marks=pytest.mark.slow) for name in BLOCKED for rule in ("floor", "rceil")),
    ],
)
def test_more_than_one_tile(name, dtype, scale_rule, assert_same_bits):
    """Of the size that a GPU takes; and rows that share tiles, with blocks that are full and blocks that are not."""
    for shape in ((64, 128), (70, 200), (3, 2_100), (300, 9)):
        x = sample(*shape, dtype=dtype)
        rows, columns = (fake_quantize(x, name, axis=axis, scale_rule=scale_rule, backend="torch") for axis in (1, 0))
        assert_same_bits(run(x, name, axis=1, scale_rule=scale_rule), rows)
        assert_same_bits(run(x, name, axis=0, scale_rule=scale_rule), columns)
        both = fake_quantize_both(x.to(DEVICE), name, scale_rule=scale_rule, backend="triton")
        assert_same_bits(both[0].cpu(), rows)
        assert_same_bits(both[1].cpu(), columns)


@pytest.mark.usefixtures("device_tiles")
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in BLOCKED])
def test_more_than_one_tile_without_blocks(name, assert_same_bits):
    x = sample(9, 1_111)
    assert_same_bits(run(x, name), fake_quantize(x, name, backend="torch"))


@pytest.mark.usefixtures("device_tiles")
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "hifp8"])
def test_codes_of_more_than_one_tile(name):
    x = sample(70, 200)
    for axis in (0, 1):
        expected = quantize(x, name, axis=axis, backend="torch")
        found = quantize(x.to(DEVICE), name, axis=axis, backend="triton")
        assert torch.equal(found.codes.cpu(), expected.codes)
        assert found.scales is None or torch.equal(found.scales.cpu(), expected.scales)


@pytest.mark.usefixtures("device_tiles")
def test_amax_is_found_wherever_it_is(monkeypatch, assert_same_bits):
    """Two programs look through five tiles."""
    from megatron.quantscope.formats import triton_backend

    monkeypatch.setattr(triton_backend, "_AMAX_PROGRAMS", 2)
    for place in range(0, 10_000, 1_111):
        x = sample(10_000)
        x[place] = -1e9
        assert_same_bits(run(x, "fp8_e4m3"), fake_quantize(x, "fp8_e4m3", backend="torch"))


@pytest.mark.parametrize("amax", [449.75, 453.25])
def test_results_are_rounded_to_bf16_to_even(amax):
    """The scale is 1 / 1.bbbbbbb1 in binary: powers of two come back half-way between two bf16."""
    x = torch.tensor([1.0, -2.0, 2.0**-6]).bfloat16()
    inverse = np.float32(1) / (np.float32(448) / np.float32(amax))
    assert (int(inverse.view(np.uint32)) & 0xFFFF) == 0x8000
    found = run(x, "fp8_e4m3", amax=torch.tensor(amax))
    np.testing.assert_array_equal(found.float().numpy(), (x.float().numpy() * inverse).astype(ml_dtypes.bfloat16))


@by_block_format
@pytest.mark.parametrize("shape", [(1, 1), (32, 32), (33, 31), (70, 200), (5, 513)])
def test_both_axes_at_once_are_two_runs(name, shape, assert_same_bits):
    for dtype in DTYPES:
        x = sample(*shape, dtype=dtype)
        both = fake_quantize_both(x.to(DEVICE), name, backend="triton")
        for axis, found in zip((1, 0), both, strict=True):
            assert_same_bits(found.cpu(), run(x, name, axis=axis))


@by_dtype
@by_name
def test_in_place(name, dtype, assert_same_bits):
    for axis in (0, 1):
        x = sample(37, 70, dtype=dtype).to(DEVICE)
        expected = run(x, name, axis=axis)
        assert fake_quantize(x, name, axis=axis, out=x, backend="triton") is x
        assert_same_bits(x.cpu(), expected)


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(
    data=strategies.data(),
    dtype=strategies.sampled_from(DTYPES),
    name=strategies.sampled_from([*BLOCKED, *PER_TENSOR, "hifp8"]),
    scale_rule=strategies.sampled_from(["floor", "rceil"]),
)
def test_any_bits_agree_with_the_reference(data, dtype, name, scale_rule, assert_same_bits):
    x = data.draw(any_rows(dtype))
    for axis in (0, 1):
        expected = fake_quantize(x, name, axis=axis, scale_rule=scale_rule, backend="reference")
        assert_same_bits(run(x, name, axis=axis, scale_rule=scale_rule), expected)


@pytest.mark.parametrize("name", PER_TENSOR)
def test_shards_with_the_amax_of_the_whole_are_the_whole(name, assert_same_bits):
    x = sample(8, 64)
    whole = run(x, name)
    assert_same_bits(torch.cat([run(shard, name, amax=x.abs().max()) for shard in x.split(2)]), whole)
    assert not torch.equal(run(x[:2], name), whole[:2])


@pytest.mark.parametrize("name", PER_TENSOR)
@pytest.mark.parametrize("magnitude", [0.0, 1e-42, 1e-36, 5e37, float("inf"), float("nan")])
def test_scale_of_a_tensor_at_its_ends(name, magnitude, assert_same_bits):
    x = sample(4, 48)
    x = x / x.abs().max() * magnitude if magnitude < 1e38 else x.index_fill(0, torch.tensor([1]), magnitude)
    assert_same_bits(run(x, name), fake_quantize(x, name, backend="reference"))


def e8m0_exponents(x: np.ndarray, name: str, scale_rule: str) -> np.ndarray:
    """The exponent of the scale of each row, in float64."""
    fmt, amax = FORMATS[name], np.abs(x.astype(np.float64)).max(axis=1)
    if scale_rule == "floor":
        return np.frexp(amax)[1] - 1 - fmt.emax
    ratio = (amax.astype(np.float32) / np.float32(fmt.max)).astype(np.float64)
    return np.ceil(np.log2(ratio)).astype(np.int64)


def element_codes(values: np.ndarray, element: str) -> np.ndarray:
    """ml_dtypes' codes of values that need rounding only, one a byte."""
    return values.astype(np.float32).astype(ML_DTYPES[element]).view(np.uint8)


def unpacked(codes: Tensor, fmt: Format) -> np.ndarray:
    if fmt.bits != 4:
        return codes.cpu().numpy()
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).cpu().numpy()


@pytest.mark.parametrize("scale_rule", ["floor", "rceil"])
@pytest.mark.parametrize("name", GOLDEN_BLOCKS)
def test_codes_of_mx_are_those_of_ml_dtypes(name, scale_rule):
    fmt, x = FORMATS[name], sample(50, 32).numpy()
    exponents = e8m0_exponents(x, name, scale_rule)
    scaled = np.clip(x / 2.0 ** exponents[:, None], -fmt.max, fmt.max)
    for axis in (1, 0):
        along = torch.from_numpy(x if axis == 1 else x.T.copy()).to(DEVICE)
        found = quantize(along, name, axis=axis, scale_rule=scale_rule, backend="triton")
        codes, scales = (found.codes, found.scales) if axis == 1 else (found.codes.t(), found.scales.t())
        np.testing.assert_array_equal(unpacked(codes, fmt), element_codes(scaled, fmt.element))
        np.testing.assert_array_equal(scales.cpu().numpy()[:, 0], exponents + 127)


def test_codes_of_nvfp4_are_those_of_ml_dtypes():
    x = sample(20, 64, seed=3).numpy()
    encode = np.float32(448 * 6) / np.abs(x).max()
    blocks = x.reshape(20, 4, 16)
    block_scale = (np.abs(blocks).max(axis=2) / np.float32(6) * encode).astype(ML_DTYPES["e4m3"])
    inverse = np.float32(1) / (block_scale.astype(np.float32) * (np.float32(1) / encode))
    scaled = np.clip(blocks * inverse[..., None], -6, 6)
    found = quantize(torch.from_numpy(x).to(DEVICE), "nvfp4", backend="triton")
    np.testing.assert_array_equal(found.scales.cpu().numpy(), block_scale.view(np.uint8))
    expected = element_codes(scaled, "e2m1").reshape(20, 64)
    np.testing.assert_array_equal(unpacked(found.codes, FORMATS["nvfp4"]), expected)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_codes_of_fp8_are_those_of_ml_dtypes(name):
    fmt, x = FORMATS[name], sample(20, 64, seed=4).numpy()
    scaled = np.clip(x * (np.float32(fmt.max) / np.abs(x).max()), -fmt.max, fmt.max)
    codes = quantize(torch.from_numpy(x).to(DEVICE), name, backend="triton").codes
    np.testing.assert_array_equal(codes.cpu().numpy(), element_codes(scaled, fmt.element))


def test_codes_of_hif8_are_those_of_en_dtypes(every_pattern):
    x = every_pattern(torch.bfloat16)
    codes = quantize(x.to(DEVICE), "hifp8", backend="triton").codes
    expected = x.float().numpy().astype(en_dtypes.hifloat8).view(np.uint8)
    np.testing.assert_array_equal(codes.cpu().numpy(), expected)


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].bits <= 8])
@by_dtype
def test_codes_are_those_of_the_torch_backend(name, dtype):
    """NaN and Inf among them, ragged, along every axis and permuted."""
    x = sample(3, 37, 18, dtype=dtype)
    x[1, 2, 3], x[2, 30, 17], x[0, 0, 0] = float("nan"), -float("inf"), -float("nan")
    for layout in (x, x.permute(2, 0, 1)):
        for axis in range(3):
            expected = quantize(layout, name, axis=axis, backend="torch")
            found = quantize(layout.to(DEVICE), name, axis=axis, backend="triton")
            assert torch.equal(found.codes.cpu(), expected.codes)
            assert (found.scales is None) == (expected.scales is None)
            if found.scales is not None:
                assert torch.equal(found.scales.cpu(), expected.scales)


@pytest.mark.parametrize("name", GOLDEN_BLOCKS)
def test_rceil_without_division_is_the_division(name):
    """Some mantissas of every binade, and all neighbours of max * 2^k: the scale's exponent field by both roads."""
    from megatron.quantscope.formats.triton_scales import scale_of

    fmt, scale = FORMATS[name], scale_of(FORMATS[name], "rceil")
    fraction = int(np.float32(fmt.max).view(np.uint32)) & 0x7FFFFF
    near = np.arange(max(0, fraction - 4), fraction + 5)
    mantissas = np.unique(np.concatenate([np.arange(0, 1 << 23, 9_973), near, [0, 1, 2, (1 << 23) - 1]]))
    bits = ((np.arange(255) << 23)[:, None] + mantissas).astype(np.int32).ravel()
    ratio = (bits.view(np.float32) / np.float32(fmt.max)).view(np.int32)
    expected = np.where(ratio <= 1 << 22, 0, (ratio + ((1 << 23) - 1)) >> 23)
    found = np.where(bits > scale.smallest_up_to, ((bits + scale.carry) >> 23) - scale.emax, 0)
    np.testing.assert_array_equal(found, expected)


def test_other_tapers_are_refused_by_name():
    fmt = replace(FORMATS["hifp8"], name="odd", bands=(Band(2, 3), Band(9, 1), Band(22, 0)))
    with pytest.raises(ValueError, match=r"backend .triton. does not take torch\.float32 on \w+ in odd"):
        run(torch.ones(4), fmt)


def test_float64_is_left_to_others():
    with pytest.raises(ValueError, match=r"backend 'triton' does not take torch\.float64"):
        run(torch.ones(4, dtype=torch.float64), "mxfp8")
