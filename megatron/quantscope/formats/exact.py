"""Sums of float64 numbers that do not depend on the order.

Every float64 is a whole number of 2^-1074, the smallest one. Python's integers have room for all of them, so a sum that
is kept as such an integer is never rounded: parts of a tensor, ranks and machines add up to the same number however
they are grouped. It is rounded once, when it is read as a float.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

UNIT_EXPONENT = -1074
_UNITS = 1 << -UNIT_EXPONENT  # in 1.0
_FRACTION_BITS = 53
_LOW_BITS = 26  # of a significand; either part of it sums up exactly in a bincount
_CHUNK = 1 << 25  # numbers whose parts sum up below 2^53
_LIMB_BITS = 32


@dataclass(frozen=True)
class ExactSum:
    """A sum without rounding.

    Attributes:
        units: How many 2^-1074 it is; None: no number, as where a square was beyond float64.
    """

    units: int | None = 0

    @classmethod
    def of(cls, values: npt.NDArray[np.float64]) -> ExactSum:
        """The sum of an array; no number if one of them is Inf or NaN."""
        if not np.isfinite(values).all():
            return cls(None)
        units = 0
        for start in range(0, values.size, _CHUNK):
            fractions, exponents = np.frexp(values.reshape(-1)[start : start + _CHUNK])
            digits = np.ldexp(fractions, _FRACTION_BITS).astype(np.int64)
            lowest = int(exponents.min())
            rows = exponents - lowest
            high, low = (np.bincount(rows, part) for part in (digits >> _LOW_BITS, digits & ((1 << _LOW_BITS) - 1)))
            for row in np.flatnonzero((high != 0) | (low != 0)):
                total = (int(high[row]) << _LOW_BITS) + int(low[row])
                shift = lowest + int(row) - _FRACTION_BITS - UNIT_EXPONENT
                units += total << shift if shift >= 0 else total >> -shift  # subnormals end in zeros
        return cls(units)

    @classmethod
    def of_float(cls, value: float) -> ExactSum:
        """One number; no number if it is Inf or NaN."""
        if not math.isfinite(value):
            return cls(None)
        numerator, denominator = value.as_integer_ratio()
        return cls(numerator * (_UNITS // denominator))

    @classmethod
    def of_limbs(cls, limbs: npt.NDArray[np.int64]) -> ExactSum:
        """From the fixed-point number of cpp/exact.h: limbs of 32 bits, lowest first, carries not yet passed on."""
        return cls(sum(int(limb) << (_LIMB_BITS * int(place)) for place, limb in _nonzero(limbs)))

    def variance(self, squares: ExactSum, count: int) -> float:
        """The population's variance of `count` numbers with this sum and this sum of squares, rounded once.

        NaN if either is no number, Inf beyond float64.
        """
        if self.units is None or squares.units is None:
            return math.nan
        numerator = count * squares.units * _UNITS - self.units**2
        try:
            return max(0, numerator) / (count * _UNITS) ** 2
        except OverflowError:
            return math.inf

    def __add__(self, other: ExactSum) -> ExactSum:
        if self.units is None or other.units is None:
            return ExactSum(None)
        return ExactSum(self.units + other.units)

    def __float__(self) -> float:
        if self.units is None:
            return math.nan
        try:
            return self.units / _UNITS  # Python rounds a quotient of integers once
        except OverflowError:
            return math.inf if self.units > 0 else -math.inf


ZERO = ExactSum()


def _nonzero(limbs: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    places = np.flatnonzero(limbs)
    return list(zip(places.tolist(), limbs[places].tolist(), strict=True))
