"""A tensor in blocks of 32 along one axis, before any format is chosen: the counts that block scales follow from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron.quantscope.formats.blocks import DEPTHS, FRACTION_CLASSES, LEAST_EXPONENT, count_blocks

__all__ = ["DEPTHS", "FRACTION_CLASSES", "BlockSummary", "summarize_blocks"]

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockSummary:
    """Blocks of a tensor. Those with a NaN or Inf have no scale and are in `total` only.

    Attributes:
        total: How many there are.
        zero: Those of zeros only.
        first: Exponent of the first row of `amax`; 0 where there is none.
        amax: [exponents, FRACTION_CLASSES]: blocks by floor(log2 amax) and by the fraction of amax
            (`formats.blocks`).
        depths: [DEPTHS]: non-zero elements by binades below their block's amax; None if they were not counted.
    """

    total: int
    zero: int
    first: int
    amax: Integers
    depths: Integers | None


def summarize_blocks(x: Tensor, axis: int, *, depths: bool) -> BlockSummary:
    """Count a floating-point tensor in blocks along `axis`."""
    counts = count_blocks(x, axis=axis, depths=depths)
    used = np.flatnonzero(counts.amax.any(axis=1))
    if not len(used):
        return BlockSummary(counts.total, counts.zero, 0, counts.amax[:0], counts.depths)
    rows = counts.amax[used[0] : used[-1] + 1]
    return BlockSummary(counts.total, counts.zero, int(used[0]) + LEAST_EXPONENT, rows, counts.depths)
