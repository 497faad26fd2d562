"""A tensor in blocks of 32 along one axis, before any format is chosen: the counts that block scales follow from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.quantscope.formats import slabs
from megatron.quantscope.formats.blocks import DEPTHS, FRACTION_CLASSES, LEAST_EXPONENT, count_blocks
from megatron.quantscope.formats.catalog import MX_BLOCK

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
        live: Size of blocks -> how many of that size hold anything but zeros: those that a format can make zero.
    """

    total: int
    zero: int
    first: int
    amax: Integers
    depths: Integers | None
    live: Mapping[int, int]


def summarize_blocks(x: Tensor, axis: int, *, depths: bool, sizes: Collection[int] = ()) -> BlockSummary:
    """Count a floating-point tensor in blocks along `axis`; of other sizes than 32 only those that are not zero."""
    counts = count_blocks(x, axis=axis, depths=depths)
    live = {size: _live_blocks(x, axis, size) for size in sizes if size != MX_BLOCK}
    live[MX_BLOCK] = counts.total - counts.zero
    used = np.flatnonzero(counts.amax.any(axis=1))
    if not len(used):
        return BlockSummary(counts.total, counts.zero, 0, counts.amax[:0], counts.depths, live)
    rows = counts.amax[used[0] : used[-1] + 1]
    return BlockSummary(counts.total, counts.zero, int(used[0]) + LEAST_EXPONENT, rows, counts.depths, live)


def _live_blocks(x: Tensor, axis: int, size: int) -> int:
    if not x.numel():
        return 0
    x = (x.unsqueeze(0) if x.dim() == 0 else x) if slabs.is_dense(x) else x.contiguous()
    limit = slabs.slab_elements(x.device)
    parts = (view[index] for view in slabs.blocked_views(x, axis, size) for index in slabs.slabs(view, limit))
    return sum(int(_largest(part).count_nonzero()) for part in parts)


def _largest(part: Tensor) -> Tensor:
    """The amax of each block, NaN where there is one. By halves: a plain amax across rows takes twice the time."""
    top = part.abs()
    while (length := top.shape[slabs.BLOCK_DIM]) % 2 == 0:
        low, high = (top.narrow(slabs.BLOCK_DIM, start, length // 2) for start in (0, length // 2))
        top = torch.maximum(low, high)
    return top.amax(dim=slabs.BLOCK_DIM)
