"""bf16 and fp16 tensors as counts of their 65,536 bit patterns.

Such a tensor is counted once (one bincount), and whatever is a sum over its elements is a sum over patterns, exactly:
the statistics of the tensor, and the error of any format that rounds each element by itself.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.quantscope.formats import slabs
from megatron.quantscope.formats.exact import ExactSum
from megatron.quantscope.formats.statistics import TensorStatistics

PATTERNS = 1 << 16
PATTERN_DTYPES = (torch.bfloat16, torch.float16)
_COUNT_CHUNK = 1 << 20  # elements: a bincount allocates 65,536 counters, which a smaller chunk would not be worth
_EXACT_COUNT_BITS = 30  # a square of 22 bits times a count of these is exact in float64

Counts = npt.NDArray[np.int64]


def bit_pattern_counts(tensor: Tensor) -> Counts:
    """How often each of the 65,536 bit patterns occurs in a bf16 or fp16 tensor: int64 [65536], by unsigned pattern.

    Raises:
        TypeError: Another dtype.
    """
    if tensor.dtype not in PATTERN_DTYPES:
        raise TypeError(f"bit patterns of {tensor.dtype} can not be counted: the tensor must be bfloat16 or float16")
    bits = slabs.flat(tensor.detach()).view(torch.int16)
    counts = torch.zeros(PATTERNS, dtype=torch.int64, device=bits.device)
    for chunk in torch.split(bits, _COUNT_CHUNK):
        counts += torch.bincount(chunk.int().bitwise_and_(PATTERNS - 1), minlength=PATTERNS)
    result: Counts = counts.cpu().numpy()
    return result


def bit_patterns(dtype: torch.dtype) -> Tensor:
    """The value of each bit pattern of bf16 or fp16: [65536] of that dtype, NaNs and Infs at their places."""
    return torch.arange(PATTERNS, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype)


def statistics_of_patterns(counts: Counts, dtype: torch.dtype) -> TensorStatistics:
    """The statistics of a tensor with these `bit_pattern_counts`."""
    present = np.flatnonzero(counts)
    counts, values = counts[present], _pattern_values(dtype)[present]
    nan, inf = np.isnan(values), np.isinf(values)
    usable = ~(nan | inf)
    finite, finite_counts = values[usable], counts[usable]
    nonzero = finite != 0
    exponents = np.frexp(finite[nonzero])[1] - 1
    lowest = int(exponents.min()) if exponents.size else 0
    binades = np.bincount(exponents - lowest, weights=finite_counts[nonzero]).astype(np.int64)
    return TensorStatistics(
        count=int(counts.sum()),
        zero=int(finite_counts[~nonzero].sum()),
        nan=int(counts[nan].sum()),
        inf=int(counts[inf].sum()),
        min=float(finite.min()) + 0.0 if finite.size else None,
        max=float(finite.max()) + 0.0 if finite.size else None,
        exact_sum=weighted_sum(finite, finite_counts),
        exact_squares=weighted_sum(finite * finite, finite_counts),
        exponents={lowest + int(place): int(binades[place]) for place in np.flatnonzero(binades)},
    )


def weighted_sum(values: npt.NDArray[np.float64], counts: Counts) -> ExactSum:
    """Sum of values * counts without rounding; the values have at most 22 significant bits."""
    low = counts & ((1 << _EXACT_COUNT_BITS) - 1)
    return ExactSum.of(values * low) + ExactSum.of(values * (counts - low))


@cache
def _pattern_values(dtype: torch.dtype) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = bit_patterns(dtype).double().numpy()
    return values
