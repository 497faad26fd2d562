"""Round float32 magnitudes to the values of an element, in place, without log2, exp2 or division.

Ties to even (OCP elements). Let the value lie in the binade [2^e, 2^(e+1)); the element's values there are 2^(e-m)
apart. Adding the float c = 2^(e+23-m), whose own last bit is worth 2^(e-m), makes the adder drop all lower bits, with
the rounding of IEEE 754; subtracting c again is exact. c is made from the value's exponent bits, which are held at
emin below it, so that subnormals round on their even grid, and at emax+1 above it, so that c can not overflow.

Ties away from zero (HiFloat8). The bits of a float are in the order of its value, and so are they with an integer
added: (bits + half) & mask rounds the fraction field, and a carry runs over into the exponent as it should. half and
mask depend on the exponent only, so they are one table of 256 rows, made from the bands of the record.

Both need float32 arithmetic that rounds to nearest and does not flush subnormals: torch's default on CPU and CUDA.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.quantscope.formats.records import Format

FRACTION_BITS = 23
EXPONENT_BIAS = 127
EXPONENT_MASK = 0x7F800000
_EXPONENTS = 256
Table = npt.NDArray[np.int32]


def round_magnitude_(a: Tensor, scratch: Tensor, fmt: Format, *, saturate: bool) -> None:
    """Round `a`, float32 and without sign, to the element values of `fmt`, in place.

    NaN stays NaN. A magnitude that rounds beyond `fmt.max`, Inf among them, becomes max if `saturate`, else Inf where
    the element has one, else NaN. `scratch` is a float32 tensor of a's shape whose content is lost.
    """
    _ROUNDINGS[fmt.rounding](a, scratch, fmt)
    if saturate:
        a.clamp_(max=fmt.max)
    elif fmt.has_inf:
        a.div_(torch.le(a, fmt.max, out=scratch))  # by 1 what fits, by 0 what does not
    else:
        a.masked_fill_(a > fmt.max, math.nan)


def _half_even_(a: Tensor, scratch: Tensor, fmt: Format) -> None:
    lowest, highest = ((EXPONENT_BIAS + e) << FRACTION_BITS for e in (fmt.emin, fmt.emax + 1))
    raised = (FRACTION_BITS - fmt.mantissa_bits) << FRACTION_BITS
    c_bits = scratch.view(torch.int32)
    torch.bitwise_and(a.view(torch.int32), EXPONENT_MASK, out=c_bits)
    c_bits.clamp_(lowest, highest).add_(raised)
    a.add_(scratch).sub_(scratch)


def _half_away_(a: Tensor, scratch: Tensor, fmt: Format) -> None:
    half, mask = (torch.from_numpy(table).to(a.device) for table in _half_away_tables(fmt))
    bits = a.view(torch.int32).flatten()
    exponent = bits >> FRACTION_BITS
    term = torch.index_select(half, 0, exponent, out=scratch.view(torch.int32).flatten())
    bits.add_(term).bitwise_and_(torch.index_select(mask, 0, exponent, out=term))


@cache
def _half_away_tables(fmt: Format) -> tuple[Table, Table]:
    """(half, mask), int32 [256], by the exponent field of a float32.

    The binade just below the smallest value goes up to that value as a whole: its lower end is the tie. What is smaller
    goes to zero, and what is too large, Inf and NaN among it, stays as it is for the caller to settle.
    """
    half, mask = [0] * _EXPONENTS, [0] * _EXPONENTS
    smallest = int(math.log2(fmt.min_subnormal))
    for field in range(_EXPONENTS):
        exponent = field - EXPONENT_BIAS
        if exponent > fmt.emax:
            mask[field] = -1
        elif exponent >= smallest:
            dropped = FRACTION_BITS - fmt.mantissa_bits_at(exponent)
            half[field], mask[field] = 1 << (dropped - 1), -(1 << dropped)
        elif exponent == smallest - 1:
            half[field], mask[field] = 1 << FRACTION_BITS, -(1 << FRACTION_BITS)
    return np.array(half, dtype=np.int32), np.array(mask, dtype=np.int32)


def rounded_to_odd(x: Tensor) -> Tensor:
    """A float64 tensor as float32: truncated, the last bit set where that lost anything; NaN and Inf stay."""
    nearest = x.float()
    too_far = nearest.double().abs() > x.abs()
    truncated = torch.where(too_far, nearest.nextafter(torch.zeros_like(nearest)), nearest)
    inexact = (truncated.double() != x) & torch.isfinite(x)
    return (truncated.view(torch.int32) | inexact.int()).view(torch.float32)


_ROUNDINGS = {"half_even": _half_even_, "half_away": _half_away_}
