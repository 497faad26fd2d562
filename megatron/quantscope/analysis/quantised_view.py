"""One operand before and after quantisation: what every block keeps, and where every value goes.

Blocks run along the axis of the operand's first GEMM, as in training. What is kept of a tensor has a fixed size: a map
of at most MAP_ROWS x MAP_BLOCKS tiles, each the worst of its blocks, and counts of pairs of magnitudes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.quantscope.analysis.distribution import spread_stride
from megatron.quantscope.analysis.format_errors import Treatment
from megatron.quantscope.analysis.roles import Role
from megatron.quantscope.analysis.what_if import as_quantized, block_map

MAP_ROWS, MAP_BLOCKS = 96, 96
EXACT_DB = 80.0  # what a block without an error counts as
BINS_PER_BINADE = 4
_BINADES = 24  # below the largest value
_PAIRS = 1 << 21  # of evenly spaced elements, to twice that


@dataclass(frozen=True, kw_only=True)
class QuantisedView:
    """What a format does to one operand.

    Attributes:
        format: Its name.
        gemm: The GEMM along whose axis blocks run.
        rows: Of blocks in the whole operand.
        blocks: In a row of it.
        sqnr_db: [tiles, tiles]: the lowest SQNR among the blocks of a tile, at most EXACT_DB; NaN where all are zeros.
        first: log2 of the lower end of the bins of magnitudes.
        pairs: [1 + bins, bins]: how many elements have |q| in a bin (rows; row 0: q is zero) and |x| in one (columns).
    """

    format: str
    gemm: str
    rows: int
    blocks: int
    sqnr_db: npt.NDArray[np.float32]
    first: int
    pairs: npt.NDArray[np.int64]


def quantised_view(tensor: Tensor, role: Role, format: str, head_dim: int | None = None) -> QuantisedView | None:
    """Quantise an operand as its first GEMM does; None where it has no finite values but zeros.

    Args:
        tensor: As captured, of any real dtype.
        role: What it is to its GEMMs.
        format: The name of a format with blocks.
        head_dim: Of attention rows.
    """
    use, treatment = role.cuts[0], Treatment(format)
    x, axis = use.view(tensor.detach(), head_dim)
    figures = block_map(tensor, role, treatment, head_dim)
    if not bool((figures.signal > 0).any()):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        signal, error = (_rows(of, axis) for of in (figures.signal, figures.error))
        sqnr = np.minimum(10 * np.log10(signal / error), EXACT_DB)
    sqnr[signal == 0] = np.nan
    first, pairs = _pairs(x, as_quantized(tensor, role, treatment, head_dim))
    rows, blocks = sqnr.shape
    return QuantisedView(
        format=format, gemm=use.gemm, rows=rows, blocks=blocks, sqnr_db=_worst(sqnr), first=first, pairs=pairs
    )


def _rows(figures: Tensor, axis: int) -> npt.NDArray[np.float64]:
    """[rows, blocks] of figures of blocks along an axis."""
    moved = figures.movedim(axis, -1)
    rows: npt.NDArray[np.float64] = moved.reshape(-1, moved.shape[-1]).double().numpy()
    return rows


def _worst(sqnr: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """The lowest of each tile; NaN where it has none."""
    badness = torch.from_numpy(np.where(np.isnan(sqnr), -np.inf, -sqnr))
    size = (min(MAP_ROWS, sqnr.shape[0]), min(MAP_BLOCKS, sqnr.shape[1]))
    pooled = -torch.nn.functional.adaptive_max_pool2d(badness[None], size)[0].numpy()
    result: npt.NDArray[np.float32] = np.where(np.isinf(pooled), np.nan, pooled).astype(np.float32)
    return result


def _pairs(x: Tensor, q: Tensor) -> tuple[int, npt.NDArray[np.int64]]:
    stride = spread_stride(x.numel(), _PAIRS)
    flat_x, flat_q = (t.reshape(-1)[::stride].double().abs() for t in (x, q))
    known = torch.isfinite(flat_x) & torch.isfinite(flat_q) & (flat_x > 0)
    flat_x, flat_q = flat_x[known], flat_q[known]
    bins = BINS_PER_BINADE * _BINADES
    last = int(torch.ceil(torch.log2(torch.maximum(flat_x, flat_q).max()))) + 1 if len(flat_x) else 0
    first = last - _BINADES
    columns = _bins(flat_x, first, bins)
    rows = torch.where(flat_q > 0, 1 + _bins(flat_q, first, bins), 0)
    counts = torch.bincount(rows * bins + columns, minlength=(1 + bins) * bins)
    pairs: npt.NDArray[np.int64] = counts.reshape(1 + bins, bins).numpy()
    return first, pairs


def _bins(magnitudes: Tensor, first: int, bins: int) -> Tensor:
    """The bin of each, those below all bins in the first."""
    return torch.floor(BINS_PER_BINADE * (torch.log2(magnitudes) - first)).long().clamp_(0, bins - 1)
