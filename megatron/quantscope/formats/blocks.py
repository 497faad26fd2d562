"""What the blocks of a tensor are like before any format is chosen: how large each is, and how deep its elements lie.

The scale of a block follows from its amax = 2^E * f, 1 <= f < 2. Under the floor rule E is enough. Under rceil it also
matters whether f is above the fraction of the format's max, which is 1.5, 1.75 or 1.875 for all MX formats. So the
counts of (E, class of f) give the scales of all of them under both rules (`analysis.scales`).

How many binades an element lies below its block's amax says how it stands in the format's range, whatever the scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.quantscope.formats import slabs
from megatron.quantscope.formats.backends import AUTO, BACKENDS
from megatron.quantscope.formats.catalog import MX_BLOCK
from megatron.quantscope.formats.job import checked_axis
from megatron.quantscope.formats.scales import as_float32

FRACTION_LIMITS = (1.5, 1.75, 1.875)
"""f <= the first, <= the second, <= the third, above: the classes of f, as many as there are limits and one more."""
FRACTION_CLASSES = len(FRACTION_LIMITS) + 1
DEPTHS = 64
"""Binades below the block's amax that are told apart; the last one takes all that is smaller."""
LEAST_EXPONENT = -149  # of a float32
EXPONENTS = 277  # up to 127

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockCounts:
    """Counts over the blocks of 32 of a tensor; a last block that is not full is a short block.

    Attributes:
        total: Blocks.
        zero: Those of zeros only.
        nonfinite: Those with a NaN or Inf, which are in no other count.
        amax: [EXPONENTS, FRACTION_CLASSES]: the others by floor(log2 amax), from `LEAST_EXPONENT`, and by the fraction.
        depths: [DEPTHS]: their elements but zeros by binades below amax; None if nobody asked.
    """

    total: int
    zero: int
    nonfinite: int
    amax: Counts
    depths: Counts | None


def count_blocks(x: Tensor, *, axis: int = -1, depths: bool = False, backend: str = AUTO) -> BlockCounts:
    """Count a tensor in blocks of 32, from one read of it.

    Args:
        x: Of bf16, fp16, float32 or float64 (which is taken as float32, rounded to odd), of any shape.
        axis: Dimension along which blocks run.
        depths: Also count the elements by their depth.
        backend: `auto`, `cpp` or `torch`.

    Raises:
        ValueError: There is no such axis; `backend` is unknown, or can not take this tensor.
    """
    if backend not in (AUTO, "cpp", "torch"):
        raise ValueError(f"backend {backend!r} does not count: choose auto, cpp or torch")
    x = x.detach()
    x = (x.unsqueeze(0) if x.dim() == 0 else x) if slabs.is_dense(x) else x.contiguous()
    axis = checked_axis(x.dim(), axis)
    lacks = BACKENDS["cpp"].lacks()
    able = lacks is None and x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    if backend == "cpp" and not able:
        raise ValueError(f"backend 'cpp' can not count {x.dtype} on {x.device}: {lacks or 'it takes bf16, fp16, fp32'}")
    if able and backend != "torch" and x.numel():
        from megatron.quantscope.formats.cpp_measure import block_counts_of

        return block_counts_of(x, axis, depths)
    return _counts(x, axis, depths)


def _counts(x: Tensor, axis: int, depths: bool) -> BlockCounts:
    total = zero = nonfinite = 0
    amax = np.zeros(EXPONENTS * FRACTION_CLASSES, dtype=np.int64)
    deep = np.zeros(DEPTHS, dtype=np.int64)
    for part in _parts(x, axis):
        top = part.amax(dim=slabs.BLOCK_DIM, keepdim=True)  # NaN where there is one
        usable = (top > 0) & torch.isfinite(top)
        total += top.numel()
        zero += int((top == 0).sum())
        nonfinite += int((~torch.isfinite(top)).sum())
        half_fraction, exponent = torch.frexp(top[usable])
        kind = sum((half_fraction > limit / 2).to(torch.int64) for limit in FRACTION_LIMITS)
        place = (exponent - 1 - LEAST_EXPONENT) * FRACTION_CLASSES + kind
        amax += torch.bincount(place, minlength=len(amax)).cpu().numpy()
        if depths:
            below = torch.frexp(top).exponent - torch.frexp(part).exponent
            below = below[usable & (part != 0)].clamp_(max=DEPTHS - 1).to(torch.int64)
            deep += torch.bincount(below, minlength=DEPTHS).cpu().numpy()
    shape = (EXPONENTS, FRACTION_CLASSES)
    return BlockCounts(total, zero, nonfinite, amax.reshape(shape), deep if depths else None)


def _parts(x: Tensor, axis: int) -> Iterator[Tensor]:
    """The magnitudes of all blocks, float32, as views [outer, blocks, block, inner] of limited size."""
    if not x.numel():
        return
    for view in slabs.blocked_views(x, axis, MX_BLOCK):
        for index in slabs.slabs(view, slabs.slab_elements(x.device)):
            yield as_float32(view[index]).abs()
