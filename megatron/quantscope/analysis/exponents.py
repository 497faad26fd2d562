"""Exponent histograms, and where a format's limits cut them.

Bin e counts the finite, non-zero elements with 2^e <= |x| < 2^(e+1); zeros, NaNs and Infs are counted beside. The bins
are the binades of every binary format, so limits fall onto bin edges or inside one bin, and histograms of shards,
ranks and micro-batches add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from megatron.quantscope.analysis.blocks import DEPTHS
from megatron.quantscope.formats import Format
from megatron.quantscope.formats.records import exponent_of

UNDERFLOW, SUBNORMAL, NORMAL, OVERFLOW = "underflow", "subnormal", "normal", "overflow"


@dataclass(frozen=True)
class ExponentHistogram:
    """Counts of consecutive binades.

    Attributes:
        first: Exponent of the first bin.
        counts: [bins] elements.
    """

    first: int
    counts: npt.NDArray[np.int64]

    @property
    def total(self) -> int:
        """Elements in all bins."""
        return int(self.counts.sum())

    @property
    def edges(self) -> npt.NDArray[np.int64]:
        """[bins + 1] exponents at which the bins begin and end."""
        return np.arange(self.first, self.first + len(self.counts) + 1)

    @classmethod
    def of(cls, exponents: Mapping[int, int]) -> ExponentHistogram:
        """From exponent -> count; empty bins between are filled in."""
        used = [exponent for exponent, count in exponents.items() if count]
        if not used:
            return cls(0, np.zeros(0, dtype=np.int64))
        first = min(used)
        counts = np.zeros(max(used) - first + 1, dtype=np.int64)
        for exponent in used:
            counts[exponent - first] = exponents[exponent]
        return cls(first, counts)

    def count_of(self, lower: float, upper: float) -> int:
        """Elements in the bins that lie in [2^lower, 2^upper)."""
        start, end = (int(np.clip(math.ceil(edge) - self.first, 0, len(self.counts))) for edge in (lower, upper))
        return int(self.counts[start:end].sum())

    def width_of(self, share: float) -> int:
        """How many neighbouring bins hold this share of the elements, what is left over cut evenly off both ends."""
        if not self.total:
            return 0
        cumulative = np.cumsum(self.counts) / self.total
        ends = np.searchsorted(cumulative, [(1 - share) / 2, (1 + share) / 2])
        return int(ends[1] - ends[0]) + 1


def added(histograms: Iterable[ExponentHistogram]) -> ExponentHistogram:
    """The histogram of all elements together."""
    parts = [histogram for histogram in histograms if len(histogram.counts)]
    if not parts:
        return ExponentHistogram(0, np.zeros(0, dtype=np.int64))
    first = min(part.first for part in parts)
    counts = np.zeros(max(part.first + len(part.counts) for part in parts) - first, dtype=np.int64)
    for part in parts:
        counts[part.first - first : part.first - first + len(part.counts)] += part.counts
    return ExponentHistogram(first, counts)


def scaled_into_blocks(depths: npt.NDArray[np.int64], fmt: Format) -> ExponentHistogram:
    """Exponents as an MX format's elements see them: after division by the scale, which puts amax into binade emax.

    Args:
        depths: [DEPTHS]: elements by binades below their block's amax (`blocks.BlockSummary.depths`). The last holds
            all that is smaller still and is drawn as one bin.
        fmt: A format with E8M0 scales under the floor rule.
    """
    return ExponentHistogram(fmt.emax - DEPTHS + 1, depths[::-1].copy())


@dataclass(frozen=True)
class Span:
    """A range of magnitudes with one fate: from 2^lower to 2^upper; infinite where it has no end."""

    name: str
    lower: float
    upper: float


def spans(fmt: Format) -> tuple[Span, ...]:
    """What becomes of a magnitude, by the format's own limits: underflow, subnormal, normal, overflow.

    Below half the smallest value an element becomes zero; between that and the smallest value it is rounded up to it.
    Overflow begins above the largest value; what rounds down to it again lies within half a step.
    """
    zero, normal, top = (math.log2(value) for value in (fmt.min_subnormal / 2, fmt.min_normal, fmt.max))
    return (
        Span(UNDERFLOW, -math.inf, zero),
        Span(SUBNORMAL, zero, normal),
        Span(NORMAL, normal, top),
        Span(OVERFLOW, top, math.inf),
    )


@dataclass(frozen=True)
class PrecisionBand:
    """Consecutive binades in which a format has the same precision.

    Attributes:
        lower: The band holds 2^lower <= |x| < 2^upper.
        upper: See `lower`; infinite where the band has no end.
        mantissa_bits: Fraction bits; None where the format has no values.
    """

    lower: float
    upper: float
    mantissa_bits: int | None


def precision_bands(fmt: Format) -> tuple[PrecisionBand, ...]:
    """A format's bands from the smallest magnitudes up, without gaps; each side of 1 is a band of its own.

    The lowest band with values begins at half the smallest value, from where elements are rounded up to it. The last
    band begins at the largest value: what does not round down to it overflows.
    """
    zero, top = exponent_of(fmt.min_subnormal / 2), exponent_of(fmt.max)
    bands = [PrecisionBand(-math.inf, zero, None)]
    lower = zero
    binades = range(zero + 1, top)
    for bits, run in groupby(binades, key=lambda exponent: _fraction_bits(fmt, exponent)):
        upper = max(run) + 1
        bands.append(PrecisionBand(lower, upper, bits))
        lower = upper
    bands.append(PrecisionBand(top, math.inf, None))
    return tuple(bands)


def _fraction_bits(fmt: Format, exponent: int) -> int:
    """Fraction bits in a binade; a subnormal binade of a plain format loses one with each step down."""
    if fmt.is_tapered or exponent >= fmt.emin:
        return fmt.mantissa_bits_at(exponent)
    return fmt.mantissa_bits - (fmt.emin - exponent)
