"""How much of a tensor falls into each precision band of HiFloat8, as captured and after training's gradient scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron.quantscope.analysis.aggregate import Floats, exponents_of
from megatron.quantscope.analysis.exponents import ExponentHistogram, PrecisionBand, added
from megatron.quantscope.analysis.format_errors import pow2_scale
from megatron.quantscope.analysis.roles import GRADIENT_FAMILIES, SYMBOL_ORDER
from megatron.quantscope.formats import FORMATS, Format

if TYPE_CHECKING:
    import pandas

HIFP8 = FORMATS["hifp8"]
_FARTHEST = 1e6  # beyond every exponent: stands in for infinity


def scaled_exponents(frame: pandas.DataFrame, fmt: Format) -> ExponentHistogram:
    """The exponents of these tensors after each was multiplied by its own `pow2-amax` scale, an exact shift of bins.

    Of a tensor with an Inf or a NaN the scale is 1, as in training (`format_errors.as_scaled`).
    """
    largest = frame["amax"].where(frame["nan"] + frame["inf"] == 0)
    shifted = []
    for first, counts, amax in zip(frame["exponent_first"], frame["exponent_counts"], largest, strict=True):
        scale = pow2_scale(float(amax), fmt.full_precision_max)
        shifted.append(ExponentHistogram(int(first + math.log2(scale)), np.asarray(counts, dtype=np.int64)))
    return added(shifted)


def band_percentages(histogram: ExponentHistogram, bands: Sequence[PrecisionBand]) -> Floats:
    """[bands]: percent of the histogram's elements in each band; bands have no gaps, so they add up to 100."""
    edges = [(max(band.lower, -_FARTHEST), min(band.upper, _FARTHEST)) for band in bands]
    counts = np.array([histogram.count_of(lower, upper) for lower, upper in edges], dtype=float)
    return 100 * counts / max(1, histogram.total)


def histograms_by_symbol(frame: pandas.DataFrame) -> dict[str, ExponentHistogram]:
    """The exponents of each symbol that has non-zero elements; of gradients also `SYMBOL, scaled`."""
    found = {}
    for symbol in SYMBOL_ORDER:
        rows = frame[frame["symbol"] == symbol]
        histogram = exponents_of(rows)
        if histogram.total:
            found[symbol] = histogram
            if rows["family"].isin(GRADIENT_FAMILIES).any():
                found[f"{symbol}, scaled"] = scaled_exponents(rows, HIFP8)
    return found


def full_precision_percent(frame: pandas.DataFrame) -> float:
    """Percent of the non-zero elements in HiFloat8's innermost band, gradients after their scale; NaN without any."""
    gradient = bool(frame["family"].isin(GRADIENT_FAMILIES).any())
    histogram = scaled_exponents(frame, HIFP8) if gradient else exponents_of(frame)
    limit = HIFP8.bands[0].limit
    return 100 * histogram.count_of(-limit, limit + 1) / histogram.total if histogram.total else math.nan
