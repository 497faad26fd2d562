"""What a number format does to a tensor, counted: the error record, and the treatments that are tried.

    SQNR        10 log10(sum x^2 / sum (x - q(x))^2), in dB, over the finite elements
    underflow   elements that are not zero and become zero
    saturated   elements beyond the largest value, which become that value
    lost        finite elements that become Inf or NaN

Sums and counts are kept, not ratios, so records of shards, micro-batches and ranks add up exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.quantscope.formats import ALIASES, FORMATS, Format
from megatron.quantscope.formats.statistics import sqnr_db

POW2_SUFFIX = "_pow2"
POW2_FORMATS = ("fp16", "hifp8")
_COUNTED_SCALES = (None, "fp32", "e8m0")  # of the formats whose errors follow from counts


@dataclass(frozen=True, kw_only=True)
class FormatError:
    """The damage of one treatment to one tensor, or to many.

    Attributes:
        error_squares: Sum of (x - q(x))^2 over the elements that are finite before and after.
        underflow, saturated, lost: Elements, as the module's docstring defines them.
    """

    error_squares: float = 0.0
    underflow: int = 0
    saturated: int = 0
    lost: int = 0

    def __add__(self, other: FormatError) -> FormatError:
        return FormatError(
            error_squares=self.error_squares + other.error_squares,
            underflow=self.underflow + other.underflow,
            saturated=self.saturated + other.saturated,
            lost=self.lost + other.lost,
        )

    def sqnr_db(self, signal_squares: float) -> float:
        """The SQNR for a tensor whose finite elements have this sum of squares."""
        return sqnr_db(signal_squares, self.error_squares, self.lost)


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """One way to quantise a tensor.

    Attributes:
        name: What its columns are called: the format's name, with `_pow2` where the tensor is scaled first.
        format: The format.
        scaled: Multiply by the largest power of two that keeps amax within the format's full precision, and divide it
            off after, as training does with gradients of formats without a scale of their own (`pow2-amax`).
    """

    name: str
    format: Format
    scaled: bool = False


def treatments(quant_types: Iterable[str] = ()) -> tuple[Treatment, ...]:
    """Every treatment whose error follows from counts, and the formats of the capture's own types if others."""
    wanted = {ALIASES.get(name, name) for name in quant_types}
    formats = [fmt for fmt in FORMATS.values() if fmt.scale in _COUNTED_SCALES or fmt.name in wanted]
    plain = [Treatment(name=fmt.name, format=fmt) for fmt in formats]
    scaled = [Treatment(name=name + POW2_SUFFIX, format=FORMATS[name], scaled=True) for name in POW2_FORMATS]
    return (*plain, *scaled)


def pow2_scale(amax: float, limit: float) -> float:
    """The largest power of two s with s * amax <= limit; 1 where amax is 0 or not finite."""
    if not (0 < amax < math.inf):
        return 1.0
    return math.ldexp(1.0, max(-126, min(126, math.frexp(limit / amax)[1] - 1)))
