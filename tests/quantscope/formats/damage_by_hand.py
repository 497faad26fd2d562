"""What a format does to a tensor, found slowly: the reference backend quantises, plain Python looks at each element."""

import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from megatron.quantscope.formats import FORMATS, BlockFigures, FormatStatistics, dequantize, fake_quantize, quantize
from megatron.quantscope.formats.codes import decode_table, has_codes
from tests.quantscope.formats.one_by_one import exact, one_by_one

BLOCK_OF_NONE = 32  # elements that are looked at together where the format has no blocks
SLACK = np.float32(1 + 2.0**-20)
SUMS = 8
FIGURES = {
    "amax": torch.float32,
    "error": torch.float64,
    "signal": torch.float64,
    "underflow": torch.uint8,
    "saturated": torch.uint8,
    "lost": torch.uint8,
}


def by_hand(x: Tensor, name: str, *, axis: int = -1, **options: object) -> FormatStatistics:
    """As `measure_format` with blocks, of a tensor whose elements are float32 numbers."""
    wide = x.float()
    after = fake_quantize(wide, name, axis=axis, backend="reference", **options)
    tops = largest_values(wide, name, axis=axis, **options)
    rows = [tensor.movedim(axis, -1) for tensor in (wide, after, tops)]
    shape, length = rows[0].shape[:-1], rows[0].shape[-1]
    block = FORMATS[name].block or BLOCK_OF_NONE
    found: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    dead = 0
    for row in zip(*(tensor.reshape(-1, length).numpy() for tensor in rows), strict=True):
        for start in range(0, length, block):
            figures = figures_of_block(*(numbers[start : start + block] for numbers in row))
            for figure, number in figures.items():
                found[figure].append(number)
            dead += bool(row[0][start : start + block].any() and not row[1][start : start + block].any())
    return FormatStatistics(
        tensor=one_by_one(x),
        underflow=sum(found["underflow"]),
        saturated=sum(found["saturated"]),
        lost=sum(found["lost"]),
        dead_blocks=dead,
        error=exact(sum(map(Fraction, found["error"]), Fraction())),
        blocks=BlockFigures(
            **{
                figure: torch.tensor(found[figure], dtype=dtype).reshape(*shape, -1).movedim(-1, axis)
                for figure, dtype in FIGURES.items()
            }
        ),
    )


def figures_of_block(before: np.ndarray, after: np.ndarray, tops: np.ndarray) -> dict[str, float]:
    """Of float32 numbers."""
    finite, both = np.isfinite(before), np.isfinite(before) & np.isfinite(after)
    saturated = both & (np.abs(before) > tops) & (after != 0)
    return {
        "amax": math.nan if np.isnan(before).any() else float(np.abs(before).max()),
        "error": energy(before[i] - after[i] if both[i] else 0.0 for i in range(len(before))),
        "signal": energy(before[i] if finite[i] else 0.0 for i in range(len(before))),
        "underflow": int((both & (before != 0) & (after == 0)).sum()),
        "saturated": int(saturated.sum()),
        "lost": int((finite & ~both).sum()),
    }


def energy(numbers: Iterable[float]) -> float:
    """Sum of squares in float64, in the order that is agreed on: eight sums side by side, then added in pairs."""
    s = [0.0] * SUMS
    for i, number in enumerate(numbers):
        s[i % SUMS] += float(number) ** 2
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))


def largest_values(x: Tensor, name: str, *, axis: int, **options: object) -> Tensor:
    """The largest value that each element of x could have become: the largest code, under the scale of its block.

    A scale that is not a power of two is rounded, and so is its product with x: a little more than max is no excess.
    """
    fmt = FORMATS[name]
    if not has_codes(fmt):
        return torch.full_like(x, fmt.max)
    stored = quantize(x, fmt, axis=axis, backend="torch", **options)
    code = int((decode_table(fmt) == fmt.max).nonzero()[0])
    codes = torch.full_like(stored.codes, code | code << 4 if fmt.bits == 4 else code)
    scales = {"scales": stored.scales, "tensor_scale": stored.tensor_scale}
    largest = dequantize(codes, fmt, axis=axis, length=x.shape[axis], **scales)
    return largest * SLACK.item() if fmt.has_tensor_scale else largest
