"""What a number format is, as data: one frozen record, no code path named after a format.

A format is an *element* (how many bits, where its values lie, how a value is rounded onto them) and, for the scaled
formats, a *scale* shared by a block of elements or by the whole tensor. All limits are those of an element before its
scale: `mxfp8` has max 448, and a block whose scale is 2^3 holds values up to 3584.

Most formats have one precision: `mantissa_bits` fraction bits in every normal binade [2^e, 2^(e+1)). HiFloat8 tapers:
it spends bits on the fraction near 1 and on the exponent far from it, so its precision is a table, `bands`.

This module and `catalog` import the standard library only, so that light programs can read the records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Rounding = Literal["half_even", "half_away"]
Overflow = Literal["saturate", "infinity", "nan"]
ScaleKind = Literal["e8m0", "e4m3+fp32", "fp32"]

_BLOCK_SCALES = ("e8m0", "e4m3+fp32")
_SCALE_AND_BLOCK = "blocks have the scale e8m0 or e4m3+fp32, formats without blocks fp32 or None"


@dataclass(frozen=True)
class Band:
    """A range of binades with one precision: those with |e| <= `limit`, less those of the bands before it.

    Attributes:
        limit: Largest |e| of the band, where a binade is [2^e, 2^(e+1)).
        mantissa_bits: Fraction bits of every value in it.
    """

    limit: int
    mantissa_bits: int


@dataclass(frozen=True, kw_only=True)
class Format:
    """A number format. Every limit is of one element, before its scale.

    Attributes:
        name: As `--quant-type` spells it.
        title: As figures and tables show it.
        element: Name of the element that the scaled formats share, such as e4m3.
        bits: Size of one element.
        exponent_bits: Size of the exponent field; of a tapered format, the largest.
        mantissa_bits: Size of the fraction field; of a tapered format, the largest.
        bias: What is subtracted from the exponent field; 0 where the exponent has a sign of its own.
        max: Largest finite value.
        min_normal: Smallest positive value with a leading one (for a tapered format: with a fraction field).
        min_subnormal: Smallest positive value.
        rounding: `half_even`: to nearest, ties to the even neighbour. `half_away`: ties away from zero.
        overflow: What a magnitude that rounds beyond max becomes unless `saturate` is given.
        has_inf: The element has codes for +-Inf.
        has_nan: The element has a code for NaN.
        has_negative_zero: The element has a code for -0; without it -0 becomes +0.
        bands: Precision by binade of a tapered format, innermost first; empty: one precision.
        block: Elements that share a scale, along the contraction axis; None: no block scale.
        scale: Type of the scale: `e8m0` one power of two a block; `e4m3+fp32` one E4M3 a block and one float32 a
            tensor; `fp32` one float32 a tensor; None: no scale.
        torch_dtype: Name of the torch dtype with exactly these values, where quantising is a cast.
        source: Where the numbers are written down.
    """

    name: str
    title: str
    element: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    min_normal: float
    min_subnormal: float
    rounding: Rounding
    overflow: Overflow
    has_inf: bool
    has_nan: bool
    has_negative_zero: bool = True
    bands: tuple[Band, ...] = ()
    block: int | None = None
    scale: ScaleKind | None = None
    torch_dtype: str | None = None
    source: str

    def __post_init__(self) -> None:
        if (self.scale in _BLOCK_SCALES) != (self.block is not None):
            raise ValueError(f"{self.name} has scale {self.scale!r} and block {self.block!r}: {_SCALE_AND_BLOCK}")

    @property
    def emax(self) -> int:
        """Exponent of the binade that holds `max`."""
        return exponent_of(self.max)

    @property
    def emin(self) -> int:
        """Exponent of the binade that starts at `min_normal`."""
        return exponent_of(self.min_normal)

    @property
    def is_tapered(self) -> bool:
        """Whether the precision depends on the binade."""
        return bool(self.bands)

    @property
    def has_tensor_scale(self) -> bool:
        """Whether a scale follows from the largest magnitude of the whole tensor."""
        return self.scale in ("fp32", "e4m3+fp32")

    @property
    def full_precision_max(self) -> float:
        """Largest value that has all `mantissa_bits`: `max`, but 15 for HiFloat8, whose precision then tapers off."""
        if not self.bands:
            return self.max
        return math.ldexp(2.0 - 2.0**-self.mantissa_bits, self.bands[0].limit)

    def mantissa_bits_at(self, exponent: int) -> int:
        """Fraction bits of the values in the binade [2^exponent, 2^(exponent+1)).

        Raises:
            ValueError: The format has no values in that binade.
        """
        if not self.bands and self.emin <= exponent <= self.emax:
            return self.mantissa_bits
        for band in self.bands:
            if abs(exponent) <= band.limit and exponent <= self.emax:
                return band.mantissa_bits
        raise ValueError(f"{self.name} has no normal values of exponent {exponent}")

    def is_identity_for(self, dtype: object) -> bool:
        """Whether every value of a torch dtype is a value of this format already, so that a cast changes nothing."""
        return self.torch_dtype is not None and str(dtype) == f"torch.{self.torch_dtype}"


def exponent_of(value: float) -> int:
    """floor(log2 |value|) of a finite value that is not zero, exactly."""
    return math.frexp(value)[1] - 1
