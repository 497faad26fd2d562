"""What a number format does to a tensor, counted: the error record, and the treatments that are tried.

    SQNR        10 log10(sum x^2 / sum (x - q(x))^2), in dB, over the finite elements
    underflow   elements that are not zero and become zero
    saturated   elements beyond the largest value, which become that value
    lost        finite elements that become Inf or NaN
    dead        blocks of 32 (NVFP4: 16) that are not all zeros and become all zeros

Sums and counts are kept, not ratios, so records of shards, micro-batches and ranks add up exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.quantscope.flags.quantization import SCALE_RULES
from megatron.quantscope.formats import ALIASES, FORMATS, Format, get_format
from megatron.quantscope.formats.damage import FormatDamage
from megatron.quantscope.formats.statistics import TensorStatistics, sqnr_db

if TYPE_CHECKING:
    from torch import Tensor

POW2_SUFFIX = "_pow2"
POW2_FORMATS = ("fp16", "hifp8")
USE_SUFFIXES = ("", "@2")  # by use
FLOOR = SCALE_RULES[0]
_LEAST_EXACT_EXPONENT = -126  # of a product in bf16 or float32


@dataclass(frozen=True, kw_only=True)
class FormatError:
    """The damage of one treatment to one tensor, or to many.

    Attributes:
        error_squares: Sum of (x - q(x))^2 over the elements that are finite before and after.
        underflow, saturated, lost: Elements, as the module's docstring defines them.
        dead_blocks: Blocks.
    """

    error_squares: float = 0.0
    underflow: int = 0
    saturated: int = 0
    lost: int = 0
    dead_blocks: int = 0

    @classmethod
    def of(cls, damage: FormatDamage, scale: float = 1.0) -> FormatError:
        """The record of a tensor that was multiplied by `scale` before it was quantised."""
        counts = {name: value for name, value in vars(damage).items() if name != "error"}
        return cls(error_squares=damage.error_squares / scale**2, **counts)

    def __add__(self, other: FormatError) -> FormatError:
        return FormatError(
            error_squares=self.error_squares + other.error_squares,
            underflow=self.underflow + other.underflow,
            saturated=self.saturated + other.saturated,
            lost=self.lost + other.lost,
            dead_blocks=self.dead_blocks + other.dead_blocks,
        )

    def sqnr_db(self, signal_squares: float) -> float:
        """The SQNR for a tensor whose finite elements have this sum of squares."""
        return sqnr_db(signal_squares, self.error_squares, self.lost)


@dataclass(frozen=True)
class Treatment:
    """One way to quantise a tensor.

    Attributes:
        format: The name of the format.
        scale_rule: How E8M0 scales follow from amax: `floor` or `rceil`.
        scaled: Multiply by the largest power of two that keeps amax within the format's full precision, and divide it
            off after, as training does with gradients of formats without a scale of their own (`pow2-amax`).
        use: Which of the GEMMs that the tensor goes into: the place in `Role.uses`.
    """

    format: str
    scale_rule: str = FLOOR
    scaled: bool = False
    use: int = 0

    @property
    def name(self) -> str:
        """What its columns are called: the format with `_rceil`, `_pow2` and `@2` where these apply."""
        rule = "" if self.scale_rule == FLOOR else f"_{self.scale_rule}"
        return f"{self.format}{rule}{POW2_SUFFIX if self.scaled else ''}{USE_SUFFIXES[self.use]}"

    @property
    def record(self) -> Format:
        """The format itself."""
        return FORMATS[self.format]

    @classmethod
    def named(cls, name: str) -> Treatment:
        """The treatment of a name.

        Raises:
            ValueError: There is none of that name.
        """
        if name not in _BY_NAME:
            raise ValueError(f"unknown treatment {name!r}: it is a format such as mxfp8, mxfp8_rceil@2 or hifp8_pow2")
        return _BY_NAME[name]


def _treatments_of(fmt: Format) -> Iterator[Treatment]:
    """All that can be done with a format: where it has blocks along both uses, and with every scale rule it knows."""
    for use in range(len(USE_SUFFIXES) if fmt.block else 1):
        for rule in SCALE_RULES if fmt.scale == "e8m0" else (FLOOR,):
            yield Treatment(fmt.name, rule, use=use)
    if fmt.name in POW2_FORMATS:
        yield Treatment(fmt.name, scaled=True)


_BY_NAME = {treatment.name: treatment for fmt in FORMATS.values() for treatment in _treatments_of(fmt)}


def treatments(quant_types: Iterable[str] = (), *, formats: Iterable[str] | None = None) -> tuple[Treatment, ...]:
    """Every way to quantise a tensor: each format with its scale rules and both uses.

    Args:
        quant_types: Types of a capture; those that name a format are tried whatever `formats` says.
        formats: Names of formats, or aliases, to keep to; None: all there are.

    Raises:
        ValueError: `formats` names one that there is not.
    """
    kept = set(FORMATS) if formats is None else {get_format(name).name for name in formats}
    kept |= {ALIASES.get(name, name) for name in quant_types}
    return tuple(treatment for treatment in _BY_NAME.values() if treatment.format in kept)


def as_scaled(x: Tensor, treatment: Treatment, statistics: TensorStatistics) -> tuple[Tensor, float]:
    """A tensor as a scaled treatment quantises it, and the scale, as the GEMMs of training do it.

    Args:
        x: Of a floating-point dtype.
        treatment: Which one.
        statistics: Of x.
    """
    largest = (statistics.amax or 0.0) if statistics.nan + statistics.inf == 0 else math.nan
    scale = pow2_scale(largest, treatment.record.full_precision_max)
    if scale == 1.0:
        return x, scale
    smallest = min(statistics.exponents) + math.frexp(scale)[1] - 1
    if smallest < _LEAST_EXACT_EXPONENT:  # so that what the product would flush still counts as underflow
        return x.double() * scale, scale
    return (x.float() if str(x.dtype) == "torch.float16" else x) * scale, scale  # fp16 has no room for the factor


def pow2_scale(amax: float, limit: float) -> float:
    """The largest power of two s with s * amax <= limit; 1 where amax is 0 or not finite."""
    if not (0 < amax < math.inf):
        return 1.0
    return math.ldexp(1.0, max(-126, min(126, math.frexp(limit / amax)[1] - 1)))
