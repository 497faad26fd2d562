"""The scales of scaled formats, for the Triton kernels: the rules of `scales`, from a block's amax as an integer.

E8M0. With amax = 2^e * f and max = 2^E * g, both rules are one addition and one shift on the bits of amax: floor takes
e - E, and rceil one more where f > g, which is where the fraction, with what g lacks to 2 added, carries into the
exponent. No quotient is needed: where f > g they differ by a last place at least, and float32(f / g) is above 1, as
g < 2. Only just above 2^-127, where the quotient is subnormal, can it round down to 2^-127; `smallest_up_to` says how
far that scale goes, and is found with the division itself.

NVFP4 and per-tensor FP8 are defined by float32 operations one by one, so these are written out, with the division that
rounds to nearest. The kernels must be compiled without contraction of a product and a sum into one operation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import triton
import triton.language as tl

from megatron.quantscope.formats.catalog import E4M3
from megatron.quantscope.formats.records import Format, ScaleKind
from megatron.quantscope.formats.rounding import FRACTION_BITS
from megatron.quantscope.formats.triton_rounding import Element, code_of, element_of, float_bits, round_magnitude

_FLOAT32_MAX = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)
_INFINITY = tl.constexpr(float("inf"))
_INFINITY_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)
_FRACTION = tl.constexpr(FRACTION_BITS)
_TWO_TO_127 = tl.constexpr(254)  # as an exponent field; 254 - field is that of the reciprocal
_TWO_TO_MINUS_127 = tl.constexpr(1 << (FRACTION_BITS - 1))  # bits of a float32 subnormal
_E8M0_NAN = tl.constexpr(255)

_FRACTION_MASK = (1 << FRACTION_BITS) - 1


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A kind of scale, as the constants of a kernel.

    Attributes:
        kind: As in the format's record.
        block: Elements that share a scale, a power of two; None: no block scale.
        emax: Of the element.
        carry: What is added to the bits of amax so that they carry where the scale must be one step larger.
        smallest_up_to: Bits of the largest amax whose E8M0 scale is 2^-127.
        max: Of the element.
        tensor_max: What the scale of the whole tensor takes its amax to; None: no such scale.
        element: The element of the block scale itself, where that is not E8M0.
    """

    kind: ScaleKind | None
    block: int | None
    emax: int
    carry: int
    smallest_up_to: int
    max: float
    tensor_max: float | None
    element: Element | None


_TENSOR_MAX_FACTOR: dict[ScaleKind | None, float] = {"fp32": 1.0, "e4m3+fp32": E4M3.max}


def scale_of(fmt: Format, rule: str) -> Scale:
    """The constants of a format's scale, E8M0 scales by the rule `floor` or `rceil`."""
    factor = _TENSOR_MAX_FACTOR.get(fmt.scale)
    is_floor = rule == "floor"
    return Scale(
        kind=fmt.scale,
        block=fmt.block,
        emax=fmt.emax,
        carry=0 if is_floor else _FRACTION_MASK - (float_bits(fmt.max) & _FRACTION_MASK),
        smallest_up_to=((fmt.emax + 1) << FRACTION_BITS) - 1 if is_floor else _rceil_smallest_up_to(fmt),
        max=fmt.max,
        tensor_max=None if factor is None else fmt.max * factor,
        element=element_of(E4M3, saturate=True, short_input=False) if fmt.scale == "e4m3+fp32" else None,
    )


def _rceil_smallest_up_to(fmt: Format) -> int:
    """Bits of the largest amax for which float32(amax / max) <= 2^-127."""
    largest, smallest_scale = np.float32(fmt.max), np.float32(2.0**-127)
    bits = float_bits(fmt.max * 2.0**-127) if fmt.emax > 0 else 0
    while np.int32(bits + 1).view(np.float32) / largest <= smallest_scale:
        bits += 1
    return bits


@triton.jit
def tensor_scale(amax_ptr: tl.tensor, SCALE: tl.constexpr) -> tl.tensor:
    """tensor_max / amax, at most the largest float32; 1 where amax is 0, Inf or NaN. 1 too if the format has none."""
    if SCALE.tensor_max is None:
        scale = 1.0
    else:
        amax = tl.load(amax_ptr)
        quotient = tl.div_rn(tl.full((), SCALE.tensor_max, tl.float32), amax)
        scale = tl.where((amax > 0.0) & (amax < _INFINITY), tl.minimum(quotient, _FLOAT32_MAX), 1.0)
    return scale


@triton.jit
def e8m0_scale(amax_bits: tl.tensor, SCALE: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(1/S, S, code of S) of each block; S is NaN where amax is Inf or NaN."""
    field = tl.where(amax_bits > SCALE.smallest_up_to, ((amax_bits + SCALE.carry) >> _FRACTION) - SCALE.emax, 0)
    inverse = (_TWO_TO_127 - field) << _FRACTION
    bits = tl.where(field == 0, _TWO_TO_MINUS_127, field << _FRACTION)
    is_finite = amax_bits < _INFINITY_BITS
    scale = tl.where(is_finite, bits, _NAN_BITS).to(tl.float32, bitcast=True)
    return inverse.to(tl.float32, bitcast=True), scale, tl.where(is_finite, field, _E8M0_NAN)


@triton.jit
def e4m3_scale(amax_bits: tl.tensor, encode: tl.tensor, SCALE: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(1/S, S, E4M3 part of S) of each block, in TransformerEngine's order; S is NaN where amax is Inf or NaN."""
    amax = tl.where(amax_bits < _INFINITY_BITS, amax_bits, _NAN_BITS).to(tl.float32, bitcast=True)
    wanted = tl.div_rn(amax, tl.full((), SCALE.max, tl.float32)) * encode
    block_scale = round_magnitude(wanted, SCALE.element)
    scale = block_scale * tl.div_rn(tl.full((), 1.0, tl.float32), encode)
    inverse = tl.minimum(tl.div_rn(tl.full((), 1.0, tl.float32), scale), _FLOAT32_MAX)
    return inverse, scale, block_scale


@triton.jit
def block_scale(amax_bits: tl.tensor, encode: tl.tensor, SCALE: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(1/S, S, what `scale_code` makes a code of) of each block."""
    if SCALE.kind == "e8m0":
        inverse, scale, coded = e8m0_scale(amax_bits, SCALE)
    else:
        inverse, scale, coded = e4m3_scale(amax_bits, encode, SCALE)
    return inverse, scale, coded


@triton.jit
def scale_code(coded: tl.tensor, table_ptr: tl.tensor, SCALE: tl.constexpr) -> tl.tensor:
    """The byte of a block scale; `table_ptr` holds the codes of its element where it has one."""
    return coded.to(tl.uint8) if SCALE.element is None else code_of(coded, table_ptr)
