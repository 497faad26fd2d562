"""Codes and scales: those of the golden vectors and of other encoders, and they decode to what was quantised."""

import math
from dataclasses import replace
from pathlib import Path

import en_dtypes
import hypothesis
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from megatron.quantscope.formats import FORMATS, Format, Quantized, catalog, dequantize, fake_quantize, quantize
from megatron.quantscope.formats.backends import BACKENDS
from tests.golden import make_fp8
from tests.quantscope.formats.any_bits import DTYPES, FRACTION_BITS, any_rows

ENCODERS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
ELEMENTS = {fmt.name: fmt for fmt in (catalog.E4M3, catalog.E5M2, catalog.E2M3, catalog.E3M2, catalog.E2M1)}
BLOCK_FILES = {
    "mxfp8": "mxfp8_e4m3_block32",
    "mxfp8_e5m2": "mxfp8_e5m2_block32",
    "mxfp6_e2m3": "mxfp6_e2m3_block32",
    "mxfp6_e3m2": "mxfp6_e3m2_block32",
    "mxfp4": "mxfp4_block32",
}
FP4 = ("mxfp4", "nvfp4")
FP8 = ("fp8_e4m3", "fp8_e5m2")
OWN_BITS = ("bf16", "fp16")
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
NAN_SCALE = {"e8m0": 255, "e4m3+fp32": 0x7F}
NAN_SCALE_EXPONENT = 128  # of the golden vectors

by_name = pytest.mark.parametrize("name", FORMATS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_fp4 = pytest.mark.parametrize("name", FP4)


@pytest.fixture(params=["cpp", "torch"])
def backend(request) -> str:
    if reason := BACKENDS[request.param].lacks():
        pytest.skip(reason)
    return request.param


def decoded(q: Quantized, fmt: str | Format, **options: object) -> Tensor:
    return dequantize(q.codes, fmt, scales=q.scales, tensor_scale=q.tensor_scale, **options)


def unpacked(codes: Tensor) -> np.ndarray:
    """FP4 codes, one a byte, along the last axis."""
    return np.stack([codes.numpy() & 15, codes.numpy() >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def one_a_byte(codes: Tensor, fmt: Format) -> np.ndarray:
    return unpacked(codes) if fmt.bits == 4 else codes.numpy()


def encoded_by_others(x: np.ndarray, element: str) -> np.ndarray:
    """Codes by ml_dtypes of numbers that are no larger than the largest value."""
    with np.errstate(invalid="ignore"):
        return x.astype(ENCODERS[element]).view(np.uint8)


def sample(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    numbers = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=numbers) * torch.exp2(4 * torch.randn(shape, generator=numbers))).to(dtype)


@pytest.mark.parametrize("element", ENCODERS)
def test_codes_of_elements_are_golden(element, backend, golden):
    vectors, fmt = golden(f"elem_{element}"), ELEMENTS[element]
    x = vectors["x"]
    in_range = np.abs(x) <= fmt.max  # no NaN either
    expected = vectors["code_mldtypes"] if "code_mldtypes" in vectors else encoded_by_others(x, element)
    codes = one_a_byte(quantize(torch.from_numpy(x[in_range]), fmt, backend=backend).codes, fmt)
    np.testing.assert_array_equal(codes[: in_range.sum()], expected[in_range])
    beyond = ~in_range & ~np.isnan(x)
    codes = one_a_byte(quantize(torch.from_numpy(x[beyond]), fmt, backend=backend).codes, fmt)
    largest = encoded_by_others(np.copysign(np.float32(fmt.max), x[beyond]), element)
    np.testing.assert_array_equal(codes[: beyond.sum()], largest)


def test_codes_of_hif8_are_golden(backend, golden):
    vectors = golden("hif8_round")
    with np.errstate(invalid="ignore"):
        expected = vectors.get("code", vectors["x"].astype(en_dtypes.hifloat8).view(np.uint8))
    np.testing.assert_array_equal(quantize(torch.from_numpy(vectors["x"]), "hifp8", backend=backend).codes, expected)


@by_dtype
@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.has_nan])
def test_every_nan_has_the_code_of_one(name, dtype, backend):
    """A payload in its last bits only makes a NaN that looks like Inf where it is cut off."""
    unsigned = 8 * dtype.itemsize - 1
    inf = torch.tensor([math.inf], dtype=dtype).view(INTEGERS[dtype.itemsize])
    payloads = torch.cat([inf + 1, inf + (1 << FRACTION_BITS[dtype] - 1), inf + (1 << FRACTION_BITS[dtype]) - 1])
    x = torch.cat([payloads, payloads | (-1 << unsigned)]).view(dtype)
    assert x.isnan().all()
    q = quantize(x, name, backend=backend)
    assert decoded(q, name).isnan().all()


def test_every_code_of_hif8_is_golden(golden, assert_same_bits):
    vectors = golden("hif8_decode")
    assert_same_bits(dequantize(torch.from_numpy(vectors["codes"]), "hifp8"), vectors["values"])


def scale_exponents(x: np.ndarray, fmt: Format, scale_rule: str) -> np.ndarray:
    """The rules of E8M0 again, for blocks [n, 32]: -127 .. 127, or 128 for NaN."""
    amax = np.abs(x).max(axis=1).astype(np.float64)
    finite = np.isfinite(amax)
    amax[~finite] = 1.0
    if scale_rule == "floor":
        exponent = np.frexp(amax)[1] - 1 - (math.frexp(fmt.max)[1] - 1)
    else:
        amax = (amax.astype(np.float32) / np.float32(fmt.max)).astype(np.float64)  # 0 if it is too small
        fraction, above = np.frexp(amax)
        exponent = np.where(fraction == 0.5, above - 1, above)  # frexp's fraction lies in [0.5, 1)
    exponent = np.where(amax == 0, -127, np.clip(exponent, -127, 127))
    return np.where(finite, exponent, NAN_SCALE_EXPONENT)


@pytest.mark.parametrize(
    ("name", "scale_rule", "key"),
    [
        *[(name, "floor", "scale_exp") for name in BLOCK_FILES],
        *[(name, "rceil", "scale_exp_rceil") for name in ("mxfp8", "mxfp8_e5m2", "mxfp4")],
    ],
)
def test_scales_and_codes_of_mx_blocks_are_golden(name, scale_rule, key, backend, golden):
    vectors, fmt = golden(BLOCK_FILES[name]), FORMATS[name]
    x = vectors["x"]
    exponent = scale_exponents(x, fmt, scale_rule)
    if key in vectors:
        np.testing.assert_array_equal(exponent, vectors[key])
    is_nan = exponent == NAN_SCALE_EXPONENT
    assert is_nan.any()
    q = quantize(torch.from_numpy(x), fmt, scale_rule=scale_rule, backend=backend)
    np.testing.assert_array_equal(q.scales[:, 0], exponent + 127)
    assert (q.codes[torch.from_numpy(is_nan)] == 0).all()
    divided = x[~is_nan].astype(np.float64) / np.exp2(exponent[~is_nan].astype(np.float64))[:, None]
    expected = encoded_by_others(np.clip(divided, -fmt.max, fmt.max), fmt.element)
    np.testing.assert_array_equal(one_a_byte(q.codes, fmt)[~is_nan], expected)


def test_scales_and_codes_of_nvfp4_are_golden(backend, golden):
    """The float32 operations of the rule, one by one, with ml_dtypes for the two elements."""
    vectors = golden("nvfp4_block16")
    float32 = np.float32
    for i, x in enumerate(vectors["x"]):
        q = quantize(torch.from_numpy(x), "nvfp4", backend=backend)
        amax = np.abs(x).max()
        encode = float32(min(float32(448 * 6) / amax, np.finfo(float32).max)) if amax > 0 else float32(1)
        decode = float32(1) / encode
        assert q.tensor_scale.item() == decode
        blocks = x.reshape(len(x), -1, 16)
        wanted = np.abs(blocks).max(axis=-1) / float32(6) * encode
        stored = np.minimum(wanted, float32(448)).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(q.scales, stored.view(np.uint8))
        scale = stored.astype(float32)
        if "block_scale" in vectors:
            np.testing.assert_array_equal(scale, vectors["block_scale"][i])
        with np.errstate(divide="ignore"):
            inverse = np.minimum(float32(1) / (scale * decode), np.finfo(float32).max)
        elements = np.clip(blocks * inverse[..., None], -6, 6).reshape(x.shape)
        np.testing.assert_array_equal(unpacked(q.codes), encoded_by_others(elements, "e2m1"))


@pytest.mark.parametrize("name", FP8)
def test_scales_and_codes_of_fp8_are_golden(name, backend):
    with np.load(Path(make_fp8.__file__).parent / f"{name}_tensor.npz") as arrays:
        vectors = dict(arrays)
    for x, scale, code in zip(vectors["x"], vectors["scale"], vectors["code"], strict=True):
        q = quantize(torch.from_numpy(x), name, backend=backend)
        assert (q.scales.dtype, q.scales.shape) == (torch.float32, ())
        assert q.scales.item() == np.float32(1) / scale
        is_nan = np.isnan(x)
        np.testing.assert_array_equal(q.codes[~is_nan], code[~is_nan])
        assert dequantize(q.codes, name, scales=q.scales)[is_nan].isnan().all()


@by_dtype
@pytest.mark.parametrize("name", OWN_BITS)
def test_codes_of_wide_formats_are_their_bits(name, dtype, backend):
    x = sample(50, 7, dtype=dtype)
    own = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    q = quantize(x, name, backend=backend)
    assert (q.codes.dtype, q.scales, q.tensor_scale) == (torch.uint16, None, None)
    assert torch.equal(q.codes.view(own), fake_quantize(x, name, backend="reference").to(own))


def test_wide_formats_saturate_if_told(backend):
    x = torch.tensor([1e6, -math.inf, 1.0])
    for saturate, bits in ((None, [0x7C00, 0xFC00, 0x3C00]), (True, [0x7BFF, 0xFBFF, 0x3C00])):
        assert quantize(x, "fp16", saturate=saturate, backend=backend).codes.tolist() == bits


@by_dtype
@hypothesis.settings(
    max_examples=100, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(
    data=strategies.data(),
    fmt=strategies.sampled_from([*FORMATS.values(), *ELEMENTS.values()]),
    scale_rule=strategies.sampled_from(["floor", "rceil"]),
    saturate=strategies.sampled_from([None, True, False]),
    axis=strategies.sampled_from([0, 1, -1, -2]),
    transposed=strategies.booleans(),
)
def test_decoded_codes_are_what_fake_quantize_leaves(
    data, dtype, fmt, scale_rule, saturate, axis, transposed, backend, assert_same_bits
):
    """In float32: a float64 is narrowed to it by rounding to odd, so its result is one that float32 holds."""
    x = data.draw(any_rows(dtype))
    x = x.t() if transposed else x
    if not (fmt.has_inf or fmt.has_nan):
        saturate = None
    options = {"axis": axis, "scale_rule": scale_rule, "saturate": saturate, "backend": backend}
    if not (fmt.has_nan or fmt.block):
        x = x.masked_fill(x.isnan(), 0.0)  # there is no code for it, nor a scale to tell it
    q = quantize(x, fmt, **options)
    wide = x if dtype == torch.float64 else x.float()
    expected = fake_quantize(wide, fmt, **options).float()
    assert_same_bits(decoded(q, fmt, axis=axis, length=x.shape[axis]), expected)


@by_name
@by_dtype
def test_codes_decode_to_any_dtype(name, dtype, backend, assert_same_bits):
    x = sample(6, 64)
    q = quantize(x, name, backend=backend)
    assert_same_bits(decoded(q, name, dtype=dtype), fake_quantize(x, name).to(dtype))


@pytest.mark.parametrize("name", BLOCK_FILES)
def test_codes_of_bf16_decode_to_what_training_sees(name, backend, assert_same_bits):
    x = sample(40, 96, dtype=torch.bfloat16)
    for axis in (0, 1):
        q = quantize(x, name, axis=axis, backend=backend)
        assert_same_bits(decoded(q, name, axis=axis, dtype=torch.bfloat16), fake_quantize(x, name, axis=axis))


@by_fp4
def test_fp4_is_packed_low_half_first(name, backend):
    """The scale is 1 here: amax 4 for the floor rule of MX, and 6 for nvfp4 with an amax that makes its scales so."""
    x = torch.tensor([0.5, -1.0, 1.5, 4.0, -0.0, 3.0, 2.0])
    options = {"amax": torch.tensor(448 * 6.0)} if name == "nvfp4" else {}
    if name == "nvfp4":
        x[3] = 6.0
    last = {"mxfp4": 6, "nvfp4": 7}[name]
    q = quantize(x, name, backend=backend, **options)
    assert q.codes.tolist() == [0x1 | 0xA << 4, 0x3 | last << 4, 0x8 | 0x5 << 4, 0x4]
    assert q.scales.tolist() == [{"mxfp4": 127, "nvfp4": 0x38}[name]]  # 2^0 as E8M0 and as E4M3
    assert decoded(q, name, length=7).tolist() == x.tolist()
    assert decoded(q, name).tolist() == [*x.tolist(), 0.0]


@by_fp4
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 33, 64, 65])
def test_fp4_is_packed_along_the_axis_of_the_blocks(name, length, backend, assert_same_bits):
    x = sample(3, length, 5)
    for axis in (0, 1, 2):
        moved = x.movedim(1, axis)
        q = quantize(moved, name, axis=axis, backend=backend)
        shape = list(moved.shape)
        shape[axis] = -(-length // 2)
        assert list(q.codes.shape) == shape
        along = quantize(x.movedim(1, -1).contiguous(), name, backend=backend)
        assert torch.equal(q.codes.movedim(axis, -1), along.codes.movedim(-1, 1).movedim(1, -1))
        expected = fake_quantize(moved, name, axis=axis)
        assert_same_bits(decoded(q, name, axis=axis, length=length), expected)
        if length % 2:
            assert (q.codes.select(axis, -1) >> 4 == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.block])
def test_block_with_nan_or_inf_has_codes_0_under_a_scale_nan(name, bad, backend):
    fmt = FORMATS[name]
    x = sample(4, 5 * fmt.block - 3)
    x[1, fmt.block + 2] = x[2, -1] = bad
    per_byte = 8 // fmt.bits
    for axis in (1, 0):
        q = quantize(x if axis else x.t().contiguous(), name, axis=axis, amax=torch.tensor(9.0), backend=backend)
        codes, scales = (q.codes, q.scales) if axis else (q.codes.t(), q.scales.t())
        is_bad = scales == NAN_SCALE[fmt.scale]
        assert torch.nonzero(is_bad).tolist() == [[1, 1], [2, 4]]
        assert (codes[1, fmt.block // per_byte : 2 * fmt.block // per_byte] == 0).all()
        assert (codes[2, 4 * fmt.block // per_byte :] == 0).all()
        assert (codes[0] != 0).any()


@by_name
@by_dtype
def test_shapes_and_dtypes(name, dtype, backend):
    fmt = FORMATS[name]
    for shape in ((70,), (3, 70), (2, 35, 6), (1, 1), (64, 32)):
        x = sample(*shape, dtype=dtype)
        for axis in range(len(shape)):
            q = quantize(x, name, axis=axis, backend=backend)
            codes, scales = list(shape), list(shape)
            codes[axis] = -(-shape[axis] * min(fmt.bits, 8) // 8) if fmt.bits == 4 else shape[axis]
            assert (list(q.codes.shape), q.codes.dtype) == (codes, torch.uint16 if name in OWN_BITS else torch.uint8)
            if fmt.block:
                scales[axis] = math.ceil(shape[axis] / fmt.block)
                assert (list(q.scales.shape), q.scales.dtype) == (scales, torch.uint8)
            elif name in FP8:
                assert (q.scales.shape, q.scales.dtype) == ((), torch.float32)
            else:
                assert q.scales is None
            if name == "nvfp4":
                assert (q.tensor_scale.shape, q.tensor_scale.dtype) == ((), torch.float32)
            else:
                assert q.tensor_scale is None


@by_name
def test_any_layout_gives_the_codes_and_scales_of_a_contiguous_tensor(name, backend):
    x = sample(4, 70, 6)
    layouts = {
        "permuted": x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "with gaps": torch.stack([x, -x], dim=-1)[..., 0],
        "expanded": x[..., None].expand(-1, -1, -1, 2)[..., 1],
        "offset": torch.cat([torch.ones(1), x.flatten()])[1:].view(x.shape),
        "part of a gradient": x.clone().requires_grad_(),
    }
    for axis in range(3):
        expected = quantize(x, name, axis=axis, backend=backend)
        for layout in layouts.values():
            found = quantize(layout, name, axis=axis, backend=backend)
            for actual, wanted in zip(found, expected, strict=True):
                assert (actual is None) == (wanted is None)
                assert actual is None or torch.equal(actual, wanted)
    assert torch.equal(x, sample(4, 70, 6))


@by_name
def test_decoding_takes_any_layout(name, assert_same_bits):
    x = sample(6, 64)
    q = quantize(x, name)
    gaps = [None if t is None else t if t.dim() == 0 else torch.stack([t, t], dim=-1)[..., 0] for t in q]
    assert_same_bits(decoded(Quantized(*gaps), name), fake_quantize(x, name))
    turned = [None if t is None else t if t.dim() == 0 else t.t().contiguous().t() for t in q]
    assert_same_bits(decoded(Quantized(*turned), name), fake_quantize(x, name))


@pytest.mark.parametrize("name", [*FP8, "nvfp4"])
def test_shards_with_the_amax_of_the_whole_have_its_codes(name, backend):
    x = sample(8, 64)
    whole = quantize(x, name, backend=backend)
    shards = [quantize(shard, name, amax=x.abs().max(), backend=backend) for shard in x.split(2)]
    assert torch.equal(torch.cat([shard.codes for shard in shards]), whole.codes)
    for shard in shards:
        scale, expected = (q.scales if name in FP8 else q.tensor_scale for q in (shard, whole))
        assert scale == expected
    assert quantize(x, name, amax=x.abs().max(), backend=backend).codes.equal(whole.codes)


@by_name
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_empty_tensors(name, shape, backend):
    x = torch.empty(shape)
    for axis in range(len(shape)):
        q = quantize(x, name, axis=axis, backend=backend)
        assert q.codes.numel() == 0
        assert decoded(q, name, axis=axis, length=shape[axis]).shape == shape


@by_name
def test_a_single_number_is_a_vector_of_one(name, backend):
    q = quantize(torch.tensor(1.7), name, backend=backend)
    assert decoded(q, name, length=1).flatten().tolist() == [fake_quantize(torch.tensor(1.7), name).item()]
    vector = quantize(torch.tensor([1.7]), name, backend=backend)
    assert q.codes.flatten().tolist() == vector.codes.tolist()
    if name not in OWN_BITS:
        assert q.codes.shape == (1,)


def test_a_record_is_as_good_as_a_name(backend):
    x = sample(3, 32)
    assert quantize(x, FORMATS["mxfp4"], backend=backend).codes.equal(quantize(x, "mxfp4", backend=backend).codes)
    assert quantize(x, "mxfp8_e4m3", backend=backend).codes.equal(quantize(x, "mxfp8", backend=backend).codes)


def test_backends_that_the_kernels_leave_to_torch(assert_same_bits):
    fmt = replace(FORMATS["mxfp8"], name="custom", block=24)
    x = sample(5, 100)
    assert_same_bits(decoded(quantize(x, fmt), fmt), fake_quantize(x, fmt, backend="reference"))
