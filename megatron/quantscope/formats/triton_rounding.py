"""Rounding to the values of an element, for the Triton kernels: what the record says, as numbers a kernel can use.

A kernel is given an `Element` as a compile-time constant; nothing in it knows a format by name. All roundings but one
are the addition of c (`rounding` explains it): with c = 2^(e+23-m), (a + c) - c is `a` rounded to m fraction bits in
the binade [2^e, 2^(e+1)), ties to even. What differs is how c is found and what becomes of ties.

Precision. c is the power of two at the exponent bits of `a`, times 2^(23-m), and held from below at that of the
smallest value, so that subnormals round on their even grid. Where the precision tapers (HiFloat8), m falls by one each
time |e| doubles, so that factor doubles too: it is 2^floor(log2 |e|) times a constant, and e, written as a float, shows
its own log2 in its exponent bits. Comparisons with each band would take twice the operations, on the busiest unit: by
its data sheet an H200 has time for 14 integer operations, minima and comparisons an element of bf16, and 28 in all.

Ties away from zero (HiFloat8). bf16 and fp16 have so few bits that `a` * (1 + 2^-13) is exact, lies above the tie if
`a` was on it, and stays below if `a` was below; then no ties are left. A float32 has no such room: there, the tie that
went down is found again by its error, and made to go up.

bf16 as a format reaches to the end of float32's range, where c would overflow. It needs no c: its subnormals are where
float32's are, so the fraction can be rounded among the bits, and a carry runs over into the exponent as it should.

bf16 tensors come and go as int16: their bits are the upper half of a float32's. A GPU rounds float32 to bf16 by itself;
Triton's interpreter does that wrongly (ties go up, subnormals go astray), so there the bits are rounded here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import triton
import triton.language as tl

from megatron.quantscope.formats.records import Format, exponent_of
from megatron.quantscope.formats.rounding import EXPONENT_BIAS, FRACTION_BITS

_CONVERTS_TO_BF16 = tl.constexpr(not triton.knobs.runtime.interpret)
Ties = Literal["even", "away", "away_short"]

_EXPONENT_MASK = tl.constexpr(0x7F800000)
_SIGN = tl.constexpr(-0x80000000)
_NAN_BITS = tl.constexpr(0x7FC00000)
_FRACTION = tl.constexpr(FRACTION_BITS)
_TIE_BREAKER = tl.constexpr(1.0 + 2.0**-13)  # fp16 has 11 significant bits, and 24 are exact
_HALF_A_STEP = tl.constexpr(2.0 ** -(FRACTION_BITS + 1))  # of c's last bit, as a part of c

_INFINITY_BITS = 0x7F800000


@dataclass(frozen=True, kw_only=True)
class Taper:
    """How to make the factor between 2^e and c from the exponent field of 2^e: |field - bias| in some unit.

    Attributes:
        shift_bits: Bits of the float whose last bit is worth that unit, so that an integer added to them counts units.
        shift_and_bias: What to subtract from the sum, as a float, to have e in that unit.
    """

    shift_bits: int
    shift_and_bias: float


@dataclass(frozen=True, kw_only=True)
class Element:
    """An element and what happens at its edges, as the constants of a kernel.

    Attributes:
        method: `add`: by the addition of c; `carry`: among the bits.
        dropped_bits: Fraction bits of a float32 that the element's largest precision does not have.
        c_factor: c of a binade over its lower end, where the precision is the largest.
        smallest_c: The c of the smallest value.
        taper: How the precision tapers; None: it does not.
        ties: `even`; `away`; or `away_short`, away from zero for inputs of at most 11 significant bits.
        largest: What magnitudes are held at before they are rounded; None: they are not.
        overflow_from: The least magnitude that overflows, where `largest` is None.
        overflow_bits: What it becomes: Inf or NaN.
        negative_zero: -0 stays -0.
    """

    method: Literal["add", "carry"]
    dropped_bits: int
    c_factor: float
    smallest_c: float
    taper: Taper | None
    ties: Ties
    largest: float | None
    overflow_from: float
    overflow_bits: int
    negative_zero: bool


def element_of(fmt: Format, *, saturate: bool, short_input: bool) -> Element:
    """The constants of a format's element.

    Args:
        fmt: The format.
        saturate: Whether a magnitude beyond max becomes max.
        short_input: Whether what is to be rounded has at most 11 significant bits.

    Raises:
        NotImplementedError: The precision tapers in another way than by one bit each time |e| doubles.
    """
    away: Ties = "away_short" if short_input else "away"
    dropped_bits = FRACTION_BITS - fmt.mantissa_bits
    return Element(
        method="carry" if fmt.emin == 1 - EXPONENT_BIAS else "add",
        dropped_bits=dropped_bits,
        c_factor=2.0**dropped_bits,
        smallest_c=fmt.min_subnormal * 2.0**FRACTION_BITS,
        taper=_taper(fmt) if fmt.is_tapered else None,
        ties="even" if fmt.rounding == "half_even" else away,
        largest=fmt.max if saturate else None,
        overflow_from=_overflow_from(fmt),
        overflow_bits=_INFINITY_BITS if fmt.has_inf else _NAN_BITS.value,
        negative_zero=fmt.has_negative_zero,
    )


def float_bits(value: float) -> int:
    """The bits of a non-negative float32."""
    return int(np.float32(value).view(np.int32))


def _overflow_from(fmt: Format) -> float:
    """The least float32 that rounds beyond max, as if the exponent had room for one more value."""
    fraction_bits = fmt.mantissa_bits_at(fmt.emax)
    tie = fmt.max + math.ldexp(0.5, fmt.emax - fraction_bits)
    max_is_even = math.ldexp(fmt.max, fraction_bits - fmt.emax) % 2 == 0
    if fmt.rounding == "half_even" and max_is_even:
        return float(np.nextafter(np.float32(tie), np.float32(math.inf)))
    return tie


def _taper(fmt: Format) -> Taper:
    first = fmt.bands[0]
    steps = range(1, len(fmt.bands))
    limits = [((first.limit + 1) << step) - 1 for step in steps]
    limits[-1] = min(limits[-1], -exponent_of(fmt.min_subnormal))
    expected = [(limit, first.mantissa_bits - step) for limit, step in zip(limits, steps, strict=True)]
    if [(band.limit, band.mantissa_bits) for band in fmt.bands[1:]] != expected:
        raise NotImplementedError(f"{fmt.name} tapers otherwise than by one bit each time |e| doubles")
    smallest_factor = 2.0 ** (FRACTION_BITS - first.mantissa_bits)
    unit = smallest_factor / ((first.limit + 1) / 2)
    shift = unit * 2.0**FRACTION_BITS
    return Taper(shift_bits=float_bits(shift), shift_and_bias=shift + EXPONENT_BIAS * unit)


@triton.jit
def widen(x: tl.tensor) -> tl.tensor:
    """A loaded tile as float32; int16 is bf16."""
    return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True) if x.dtype == tl.int16 else x.to(tl.float32)


@triton.jit
def narrow(y: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """A float32 tile as it is to be stored, rounded to nearest even; int16 is bf16."""
    return _bf16_bits(y) if dtype == tl.int16 else y.to(dtype)


@triton.jit
def _bf16_bits(y: tl.tensor) -> tl.tensor:
    return y.to(tl.bfloat16).to(tl.int16, bitcast=True) if _CONVERTS_TO_BF16 else _rounded_upper_half(y)


@triton.jit
def _rounded_upper_half(y: tl.tensor) -> tl.tensor:
    bits = y.to(tl.int32, bitcast=True)
    rounded = tl.where(y == y, bits + 0x7FFF + ((bits >> 16) & 1), _NAN_BITS)
    return (rounded >> 16).to(tl.int16)


@triton.jit
def magnitude_bits(x: tl.tensor) -> tl.tensor:
    """|x| as int32: its order is that of the magnitudes, Inf and NaN come last."""
    return tl.abs(x).to(tl.int32, bitcast=True)


@triton.jit
def round_magnitude(a: tl.tensor, ELEMENT: tl.constexpr) -> tl.tensor:
    """The element value of each magnitude of a tile, all float32."""
    if ELEMENT.ties == "away_short":
        a = a * _TIE_BREAKER
    if ELEMENT.largest is not None:
        a = tl.minimum(a, ELEMENT.largest, propagate_nan=tl.PropagateNan.ALL)
    rounded = _round_bits(a, ELEMENT) if ELEMENT.method == "carry" else _round_by_adding(a, ELEMENT)
    if ELEMENT.largest is None:
        bits = tl.where(a >= ELEMENT.overflow_from, ELEMENT.overflow_bits, rounded.to(tl.int32, bitcast=True))
        rounded = bits.to(tl.float32, bitcast=True)
    return rounded


@triton.jit
def with_sign(a: tl.tensor, x: tl.tensor, ELEMENT: tl.constexpr) -> tl.tensor:
    """The magnitudes `a` with the signs of x, which a NaN has too."""
    sign = x.to(tl.int32, bitcast=True) & _SIGN
    signed = (a.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    if not ELEMENT.negative_zero:
        signed = signed + 0.0  # -0 + 0 is +0
    return signed


@triton.jit
def _round_by_adding(a: tl.tensor, ELEMENT: tl.constexpr) -> tl.tensor:
    """Magnitudes beyond `overflow_from` come out as anything."""
    bits = a.to(tl.int32, bitcast=True)
    binade = (bits & _EXPONENT_MASK).to(tl.float32, bitcast=True)
    if ELEMENT.taper is None:
        c = binade * ELEMENT.c_factor
    else:
        c = binade * tl.maximum(_tapered_factor(bits, ELEMENT.taper), ELEMENT.c_factor)
    c = tl.maximum(c, ELEMENT.smallest_c)
    rounded = (a + c) - c
    if ELEMENT.ties == "away":
        error = a - rounded
        rounded = tl.where(error == c * _HALF_A_STEP, a + error, rounded)
    return rounded


@triton.jit
def _tapered_factor(bits: tl.tensor, TAPER: tl.constexpr) -> tl.tensor:
    """2^floor(log2 |e|) in the unit of the taper; 0 where e is."""
    counted = ((bits >> _FRACTION) + TAPER.shift_bits).to(tl.float32, bitcast=True)
    e = counted - TAPER.shift_and_bias
    return (e.to(tl.int32, bitcast=True) & _EXPONENT_MASK).to(tl.float32, bitcast=True)


@triton.jit
def _round_bits(a: tl.tensor, ELEMENT: tl.constexpr) -> tl.tensor:
    """Ties to even among the bits, for elements with the exponents of float32."""
    bits = a.to(tl.int32, bitcast=True)
    below_half = (1 << (ELEMENT.dropped_bits - 1)) - 1
    rounded = (bits + below_half + ((bits >> ELEMENT.dropped_bits) & 1)) & -(1 << ELEMENT.dropped_bits)
    return tl.where(a == a, rounded.to(tl.float32, bitcast=True), a)


@triton.jit
def code_of(value: tl.tensor, table_ptr: tl.tensor) -> tl.tensor:
    """The codes of element values: their bf16 patterns looked up in a table of 65,536 bytes."""
    return tl.load(table_ptr + ((value.to(tl.int32, bitcast=True) >> 16) & 0xFFFF))
