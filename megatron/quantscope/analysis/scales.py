"""The E8M0 scales that an MX format gives the blocks of tensors, from the summary table: exact, without reading them.

    amax = 2^E * f, 1 <= f < 2      max = 2^emax * m, 1 <= m < 2
    floor  scale = 2^(E - emax)
    rceil  scale = 2^(E - emax), and twice that where f > m

clamped to [2^-127, 2^127]. m is 1.5, 1.75 or 1.875, and the table counts blocks by E and by where f lies among these.
Blocks of zeros only (which get 2^-127) and blocks with a NaN or Inf (which get the scale NaN) are left out.

rceil is defined by the float32 of amax / max. That is one number off the formula where scales end: of float32 tensors,
the one value next above max * 2^-127 counts as above it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron.quantscope.analysis.exponents import ExponentHistogram, added
from megatron.quantscope.analysis.format_errors import FLOOR
from megatron.quantscope.analysis.tables import BLOCK_PREFIXES
from megatron.quantscope.formats import Format, get_format
from megatron.quantscope.formats.blocks import FRACTION_CLASSES, FRACTION_LIMITS

if TYPE_CHECKING:
    import pandas

_LARGEST = 127  # exponent of a scale, of either sign

Counts = npt.NDArray[np.int64]


def scale_exponents(
    rows: pandas.DataFrame | pandas.Series, fmt: str, rule: str = FLOOR, use: int = 0
) -> ExponentHistogram:
    """How many blocks have which scale 2^e.

    Args:
        rows: Rows of the summary table, or one.
        fmt: Name of a format with E8M0 scales.
        rule: `floor` or `rceil`. Rows of captured statistics know no fractions and count for `floor` only.
        use: Along which of the GEMMs that each tensor goes into; a tensor with fewer counts for nothing.

    Raises:
        ValueError: The format has no such scales.
    """
    record = get_format(fmt)
    if record.scale != "e8m0":
        raise ValueError(f"{fmt} has no E8M0 scales")
    prefix = BLOCK_PREFIXES[use]
    columns = (f"{prefix}_exponent_first", f"{prefix}_{'exponent' if rule == FLOOR else 'fraction'}_counts")
    firsts, counts = ([rows[name]] if rows.ndim == 1 else rows[name] for name in columns)
    found = zip(firsts, counts, strict=True)
    width = 1 if rule == FLOOR else FRACTION_CLASSES
    blocks = added(_histogram(first, values, width) for first, values in found if values is not None)
    lowest, scales = scale_counts(blocks.first // width, blocks.counts.reshape(-1, width), record)
    return ExponentHistogram.of(dict(enumerate(scales.tolist(), start=lowest)))


def scale_counts(first: int, blocks: Counts, fmt: Format) -> tuple[int, Counts]:
    """From how many blocks have which amax to how many have which scale.

    Args:
        first: The exponent of the first amax.
        blocks: [..., exponents, classes]: by the exponent of amax and the class of its fraction; one class: floor.
        fmt: A format with E8M0 scales.

    Returns:
        The exponent of the first scale, and [..., scales].
    """
    above = FRACTION_LIMITS.index(fmt.max / 2.0**fmt.emax) + 1  # the classes of f > m: none where there is one class
    doubled = blocks[..., above:].sum(axis=-1)
    scales = np.zeros((*blocks.shape[:-2], blocks.shape[-2] + 1), dtype=np.int64)
    scales[..., :-1] = blocks.sum(axis=-1) - doubled
    scales[..., 1:] += doubled
    exponents = (first - fmt.emax + np.arange(scales.shape[-1])).clip(-_LARGEST, _LARGEST)
    starts = np.flatnonzero(np.diff(exponents, prepend=exponents[0] - 1))  # those that the clamp made equal are added
    return int(exponents[0]), np.add.reduceat(scales, starts, axis=-1)


def _histogram(first: float, counts: npt.ArrayLike, width: int) -> ExponentHistogram:
    """Counts of `width` classes an exponent, as a histogram of classes."""
    return ExponentHistogram(int(first) * width, np.asarray(counts, dtype=np.int64))
