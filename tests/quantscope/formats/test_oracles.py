"""Pinned libraries against `fake_quantize`: the same bits in range, and exactly what differs beyond it.

ml_dtypes, gfloat, en_dtypes and torch's own casts share no code with the package, nor with each other. In range every
one of them follows the specification. What they do with magnitudes beyond the largest value, Inf and NaN is their own
choice: a `Departure` says which inputs differ from `fake_quantize` and what the library gives there.
docs/formats.md has the table that follows from this.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata

import en_dtypes
import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.quantscope.formats import FORMATS, Format, catalog, codes, fake_quantize

PINNED = {"ml_dtypes": "0.6.0", "gfloat": "0.5.2", "en_dtypes": "0.0.4", "torch": "2.13.0"}
UNSCALED = [fmt for fmt in FORMATS.values() if fmt.scale is None]
ELEMENTS = {fmt.name: fmt for fmt in (catalog.E4M3, catalog.E5M2, catalog.E2M3, catalog.E3M2, catalog.E2M1, *UNSCALED)}
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}
EN_DTYPES = {
    "e2m3": en_dtypes.float6_e2m3,
    "e3m2": en_dtypes.float6_e3m2,
    "e2m1": en_dtypes.float4_e2m1,
    "hifp8": en_dtypes.hifloat8,
}
GFLOAT = {
    "e4m3": gfloat.formats.format_info_ocp_e4m3,
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
    "e2m3": gfloat.formats.format_info_ocp_e2m3,
    "e3m2": gfloat.formats.format_info_ocp_e3m2,
    "e2m1": gfloat.formats.format_info_ocp_e2m1,
    "bf16": gfloat.formats.format_info_bfloat16,
    "fp16": gfloat.formats.format_info_binary16,
}
GFLOAT_BLOCKS = {
    "mxfp8": gfloat.formats.format_info_mxfp8_e4m3,
    "mxfp8_e5m2": gfloat.formats.format_info_mxfp8_e5m2,
    "mxfp6_e2m3": gfloat.formats.format_info_mxfp6_e2m3,
    "mxfp6_e3m2": gfloat.formats.format_info_mxfp6_e3m2,
    "mxfp4": gfloat.formats.format_info_mxfp4_e2m1,
}
TORCH = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
PLAIN = [fmt for fmt in FORMATS.values() if not fmt.is_tapered]

DENSE_STRIDE = 4099  # prime: one float32 pattern of so many, all magnitudes and signs
REFERENCE_STRIDE = 8  # of that sample, since the reference searches a grid


@dataclass(frozen=True)
class Departure:
    """Where a library gives something else than `fake_quantize` does by default.

    Attributes:
        where: float32 inputs -> which of them.
        gives: The library's result for those inputs.
        saturate: What `fake_quantize` must be told to give the same, if it can.
    """

    where: Callable[[Tensor], Tensor]
    gives: Callable[[Tensor], Tensor]
    saturate: bool | None = None


@dataclass(frozen=True)
class Oracle:
    """One library's cast to one element: bf16, fp16 or float32 tensor -> float32 values."""

    package: str
    name: str
    fmt: Format
    cast: Callable[[Tensor], Tensor]
    departure: Departure | None = None


def from_magnitude(first: float, gives: float) -> Departure:
    """Magnitudes of `first` and more become `gives`, with their sign."""
    return Departure(
        where=lambda x: x.abs() >= first,
        gives=lambda x: torch.copysign(torch.full_like(x, gives), x),
        saturate=math.isfinite(gives),
    )


NAN_IS_ZERO = Departure(torch.isnan, lambda x: torch.copysign(torch.zeros_like(x), x))
NAN_IS_ZERO_OF_THE_OTHER_SIGN = Departure(torch.isnan, lambda x: torch.copysign(torch.zeros_like(x), -x))
JUST_ABOVE_464 = float(np.nextafter(np.float32(464), np.float32(math.inf)))  # 464 itself ties to 448
E4M3_NAN = from_magnitude(JUST_ABOVE_464, math.nan)
E5M2_INF = from_magnitude(61440.0, math.inf)
BF16_MAX = from_magnitude((2.0 - 2.0**-8) * 2.0**127, FORMATS["bf16"].max)
FP16_MAX = from_magnitude(65520.0, 65504.0)


def by_numpy(dtype: type) -> Callable[[Tensor], Tensor]:
    def cast(x: Tensor) -> Tensor:
        with np.errstate(over="ignore", invalid="ignore"):
            return torch.from_numpy(x.float().numpy().astype(dtype).astype(np.float32))

    return cast


def by_gfloat(name: str, *, saturate: bool) -> Callable[[Tensor], Tensor]:
    def cast(x: Tensor) -> Tensor:
        with np.errstate(over="ignore", invalid="ignore"):
            return torch.from_numpy(gfloat.round_ndarray(GFLOAT[name], x.float().numpy(), sat=saturate))

    return cast


def by_torch(name: str) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(TORCH[name]).float()


def oracles() -> list[Oracle]:
    """Every element of every library, with what is known of it."""
    sixes_and_fours = ("e2m3", "e3m2", "e2m1")
    ml = {"e4m3": E4M3_NAN, "e5m2": E5M2_INF} | dict.fromkeys(sixes_and_fours, NAN_IS_ZERO_OF_THE_OTHER_SIGN)
    en = dict.fromkeys(sixes_and_fours, NAN_IS_ZERO)
    native = {"e5m2": E5M2_INF}
    saturating = {"bf16": BF16_MAX, "fp16": FP16_MAX}
    overflowing = {"e4m3": E4M3_NAN, "e5m2": E5M2_INF}
    found = [("ml_dtypes", "", name, by_numpy(dtype), ml) for name, dtype in ML_DTYPES.items()]
    found += [("en_dtypes", "", name, by_numpy(dtype), en) for name, dtype in EN_DTYPES.items()]
    found += [("torch", "", name, by_torch(name), native) for name in TORCH]
    found += [("gfloat", " sat=True", name, by_gfloat(name, saturate=True), saturating) for name in GFLOAT]
    found += [
        ("gfloat", " sat=False", name, by_gfloat(name, saturate=False), overflowing)
        for name in GFLOAT
        if name not in sixes_and_fours  # refused, see test_gfloat_refuses_what_it_can_not_represent
    ]
    return [
        Oracle(package, f"{package} {name}{variant}", ELEMENTS[name], cast, departures.get(name))
        for package, variant, name, cast, departures in found
    ]


@cache
def dense_float32(name: str) -> Tensor:
    """All values of an element, the middles between them, the neighbours of both, and one float32 of every 4,099."""
    fmt = ELEMENTS[name]
    every_code = np.arange(1 << fmt.bits).astype(np.uint16 if fmt.bits == 16 else np.uint8)
    beyond = fmt.max * np.array([1.03125, 1.0625, 1.125, 1.25, 1.5, 2.0])
    with np.errstate(over="ignore", invalid="ignore"):  # beyond bf16's largest value lies Inf; its NaNs signal
        values = every_code.view((ML_DTYPES | EN_DTYPES)[name]).astype(np.float64)
        values = np.unique(values[np.isfinite(values)])
        middles = (values[1:] + values[:-1]) / 2
        exact = np.concatenate([values, middles, beyond, -beyond, [math.inf, -math.inf, math.nan]]).astype(np.float32)
    neighbours = [np.nextafter(exact, np.float32(limit)) for limit in (math.inf, -math.inf)]
    sample = np.arange(0, 1 << 32, DENSE_STRIDE, dtype=np.uint32).view(np.float32)
    return torch.from_numpy(np.concatenate([exact, *neighbours, sample]))


@pytest.fixture
def inputs_of(every_pattern) -> Callable[[Oracle, str], list[Tensor]]:
    """All bf16 and fp16 values, and the dense sample of float32."""

    def make(oracle: Oracle, backend: str) -> list[Tensor]:
        dense = dense_float32(oracle.fmt.name)
        wide = dense[::REFERENCE_STRIDE] if backend == "reference" else dense
        return [every_pattern(torch.bfloat16), every_pattern(torch.float16), wide]

    return make


def in_range(x: Tensor, fmt: Format) -> Tensor:
    """Which are no larger than the largest value, compared in float32: bf16 takes 65504 for 65536."""
    return x.float().abs() <= fmt.max


def require_pinned(package: str) -> None:
    """Skip where another version is installed: what lies outside the specification may change from one to the next."""
    installed = metadata.version(package).split("+")[0]
    if installed != PINNED[package]:
        pytest.skip(f"{package} {installed} is installed; the departures are those of {PINNED[package]}")


by_oracle = pytest.mark.parametrize("oracle", oracles(), ids=lambda oracle: oracle.name)
by_block = pytest.mark.parametrize("name", GFLOAT_BLOCKS)


@by_oracle
def test_in_range_every_cast_has_our_bits(oracle, backend, inputs_of, assert_same_bits):
    for x in inputs_of(oracle, backend):
        x = x[in_range(x, oracle.fmt)]
        assert len(x) > 20_000
        assert_same_bits(fake_quantize(x, oracle.fmt, backend=backend), oracle.cast(x))


@by_oracle
def test_beyond_the_range_every_difference_is_known(oracle, backend, inputs_of, assert_same_bits):
    """Overflow, Inf and NaN: the departure names all inputs that differ, and no input that does not."""
    require_pinned(oracle.package)
    for x in inputs_of(oracle, backend):
        x = x[~in_range(x, oracle.fmt)]
        ours, theirs, wide = fake_quantize(x, oracle.fmt, backend=backend), oracle.cast(x), x.float()
        departs = oracle.departure.where(wide) if oracle.departure else torch.zeros_like(wide, dtype=torch.bool)
        assert_same_bits(ours[~departs], theirs[~departs])
        if oracle.departure:
            assert_same_bits(theirs[departs], oracle.departure.gives(wide[departs]))
            same = (ours == theirs) | (ours.isnan() & theirs.isnan())
            assert not (same & departs).any()
            if oracle.departure.saturate is not None:
                told = fake_quantize(x, oracle.fmt, saturate=oracle.departure.saturate, backend=backend)
                assert_same_bits(told, theirs)


@pytest.mark.parametrize("name", [name for name, fmt in ELEMENTS.items() if fmt.bits <= 8])
def test_codes_are_those_of_the_libraries(name, assert_same_bits):
    """Of ml_dtypes and gfloat, or en_dtypes for HiF8: all that stand for a number, in both directions."""
    fmt = ELEMENTS[name]
    every_code = np.arange(1 << fmt.bits, dtype=np.uint8)
    values = torch.from_numpy(every_code.view((EN_DTYPES | ML_DTYPES)[name]).astype(np.float32))
    assert_same_bits(codes.decode_table(fmt), values)
    if name in GFLOAT:
        assert_same_bits(codes.decode_table(fmt), gfloat.decode_ndarray(GFLOAT[name], every_code.astype(np.int64)))
    found = codes.encode_table(fmt)[values.bfloat16().view(torch.int16).int() & 0xFFFF]
    is_number = ~values.isnan()
    assert torch.equal(found[is_number], torch.from_numpy(every_code)[is_number])
    assert values[found[~is_number].long()].isnan().all()


@pytest.mark.parametrize("fmt", PLAIN, ids=lambda fmt: fmt.name)
def test_limits_are_those_of_ml_dtypes(fmt):
    info = ml_dtypes.finfo(ML_DTYPES[fmt.element])
    assert (fmt.max, fmt.min_normal) == (float(info.max), float(info.smallest_normal))
    assert (fmt.min_subnormal, fmt.mantissa_bits) == (float(info.smallest_subnormal), info.nmant)


@pytest.mark.parametrize("fmt", PLAIN, ids=lambda fmt: fmt.name)
def test_special_values_are_those_of_gfloat(fmt):
    info = GFLOAT[fmt.element]
    assert (fmt.max, fmt.min_normal, fmt.min_subnormal) == (info.max, info.smallest_normal, info.smallest_subnormal)
    assert (fmt.bits, fmt.bias) == (info.bits, info.bias)
    assert (fmt.has_inf, fmt.has_nan, fmt.has_negative_zero) == (info.num_posinfs > 0, info.num_nans > 0, info.has_nz)


@pytest.mark.parametrize("name", ["e2m3", "e3m2", "e2m1"])
def test_gfloat_refuses_what_it_can_not_represent(name):
    """NaN one at a time (its array form lets it pass), and whatever overflows without saturation."""
    require_pinned("gfloat")
    info, fmt = GFLOAT[name], ELEMENTS[name]
    with pytest.raises(ValueError, match="No NaN in format"):
        gfloat.round_float(info, math.nan, sat=True)
    assert np.isnan(gfloat.round_ndarray(info, np.array([math.nan]), sat=True)).all()
    assert fake_quantize(torch.tensor([math.nan]), fmt).isnan().all()
    for beyond in (2 * fmt.max, -math.inf):
        with pytest.raises(ValueError, match="No Infs or NaNs in format"):
            gfloat.round_ndarray(info, np.array([beyond]), sat=False)
        with pytest.raises(ValueError, match="saturate=False is not allowed"):
            fake_quantize(torch.tensor([beyond]), fmt, saturate=False)


@pytest.mark.parametrize("name", GFLOAT)
def test_gfloat_rounds_float64_as_we_do(name, backend, assert_same_bits):
    """Once: a value, a middle and their float64 neighbours, of which a float32 knows nothing."""
    dense, fmt = dense_float32(name).double(), ELEMENTS[name]
    exact = dense[: 3 * (1 << fmt.bits)]
    exact = exact[exact.abs() <= fmt.max]
    x = torch.cat([exact, *(exact.nextafter(torch.full_like(exact, limit)) for limit in (math.inf, -math.inf))])
    x = x[x.abs() <= fmt.max]
    expected = gfloat.round_ndarray(GFLOAT[name], x.numpy(), sat=fmt.overflow == "saturate")
    assert_same_bits(fake_quantize(x, fmt, backend=backend), expected)


HALF_STEPS = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "bf16": 2.0**-8, "fp16": 2.0**-11, "hifp8": 2.0**-4}


@pytest.mark.parametrize(
    ("package", "name", "twice"),
    [
        *[("ml_dtypes", name, name != "fp16") for name in ("e4m3", "e5m2", "bf16", "fp16")],
        *[("torch", name, True) for name in TORCH],
        ("en_dtypes", "hifp8", True),
    ],
)
def test_casts_from_float64_round_twice(package, name, twice):
    """All but numpy's float16 go by way of float32, which makes a tie of what lies beside it."""
    require_pinned(package)
    lower, half = 1.0, HALF_STEPS[name]
    nudge = -(2.0**-40) if name == "hifp8" else 2.0**-40  # to the side that the tie does not go to
    x = torch.tensor([lower + half + nudge], dtype=torch.float64)
    if package == "torch":
        theirs = x.to(TORCH[name]).double().item()
    else:
        theirs = float(x.numpy().astype((ML_DTYPES | EN_DTYPES)[name]).astype(np.float64)[0])
    once, tie = (lower, lower + 2 * half) if name == "hifp8" else (lower + 2 * half, lower)
    assert fake_quantize(x, ELEMENTS[name]).item() == once
    assert theirs == (tie if twice else once)


def gfloat_rows(name: str, x: np.ndarray) -> np.ndarray:
    """gfloat's own conversion of rows that are one block each, float32 [n, <= 32].

    It is given float64: see test_gfloat_takes_the_logarithm_in_the_dtype_of_the_block.
    """
    rows = [gfloat.quantize_block(GFLOAT_BLOCKS[name], row, gfloat.compute_scale_amax) for row in x.astype(np.float64)]
    return np.array(rows, dtype=np.float32)


@cache
def gaussian_blocks(name: str) -> tuple[Tensor, np.ndarray]:
    """Blocks of every magnitude from the float32 subnormals on, narrow and wide ones: x [277, 32] and gfloat's y."""
    numbers = np.random.default_rng(1)
    magnitudes = np.arange(-149, 128)[:, None] + numbers.integers(-12, 1, (277, 32))
    x = (np.clip(numbers.standard_normal((277, 32)), -1.9, 1.9) * np.exp2(magnitudes.astype(np.float64))).astype(
        np.float32
    )
    return torch.from_numpy(x), gfloat_rows(name, x)


@cache
def pattern_blocks(name: str, dtype: torch.dtype) -> tuple[Tensor, np.ndarray]:
    """All finite values of a 16-bit dtype in the order of their patterns, 32 a block, and gfloat's y."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = values[values.isfinite()].view(-1, 32)
    return x, gfloat_rows(name, x.float().numpy())


@by_block
def test_gfloat_blocks_have_our_bits(name, backend, assert_same_bits):
    x, expected = gaussian_blocks(name)
    assert_same_bits(fake_quantize(x, name, backend=backend), expected)
    assert_same_bits(fake_quantize(x.t().contiguous(), name, axis=0, backend=backend).t(), expected)


@by_block
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gfloat_blocks_of_every_16_bit_value_have_our_bits(name, dtype, backend, assert_same_bits):
    x, expected = pattern_blocks(name, dtype)
    assert_same_bits(fake_quantize(x, name, backend=backend), expected)


@by_block
def test_gfloat_short_blocks_have_our_bits(name, backend, assert_same_bits):
    x, _ = gaussian_blocks(name)
    for width in (1, 7, 31):
        short = x[::9, :width].contiguous()
        assert_same_bits(fake_quantize(short, name, backend=backend), gfloat_rows(name, short.numpy()))


@by_block
def test_gfloat_has_a_nan_block_only_where_the_element_has_a_nan(name):
    require_pinned("gfloat")
    block = np.ones(32)
    block[3] = math.nan
    assert fake_quantize(torch.from_numpy(block), name).isnan().all()
    if FORMATS[name].has_nan:
        assert np.isnan(gfloat.quantize_block(GFLOAT_BLOCKS[name], block, gfloat.compute_scale_amax)).all()
    else:
        with pytest.raises(ValueError, match="No NaN in format"):
            gfloat.quantize_block(GFLOAT_BLOCKS[name], block, gfloat.compute_scale_amax)


@by_block
def test_gfloat_clips_the_scale_of_a_block_with_inf(name):
    """To 2^127: the Inf becomes max * 2^127, which no float32 holds, and ordinary elements become 0."""
    require_pinned("gfloat")
    block = np.ones(32)
    block[3] = math.inf
    theirs = gfloat.quantize_block(GFLOAT_BLOCKS[name], block, gfloat.compute_scale_amax)
    assert theirs[3] == FORMATS[name].max * 2.0**127
    assert (np.delete(theirs, 3) == 0.0).all()
    assert fake_quantize(torch.from_numpy(block), name).isnan().all()


@by_block
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gfloat_takes_the_logarithm_in_the_dtype_of_the_block(name, dtype):
    """Just below 2^21 it rounds up to 21, so the scale is twice what the specification says; ours is read off bits."""
    require_pinned("gfloat")
    fmt = FORMATS[name]
    below = np.nextafter(dtype(2.0**21), dtype(0))
    assert gfloat.compute_scale_amax(fmt.emax, np.array([below])) == 2.0 ** (21 - fmt.emax)
    scale = 2.0 ** (20 - fmt.emax)
    smallest = fmt.min_subnormal * scale  # twice the scale has no such element
    assert fake_quantize(torch.tensor([below, smallest]), name).tolist() == [fmt.max * scale, smallest]
