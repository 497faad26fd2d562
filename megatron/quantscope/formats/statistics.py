"""What a tensor holds, in a few numbers that add up: over ranks, micro-batches and machines.

    count, zero, nan, inf        how many elements, and how many of each kind (the rest is finite and not zero)
    min, max, sum, sum_squares   over the finite elements
    exponents                    how many finite non-zero elements lie in each binade: floor(log2 |x|) -> count

Counts are exact, also for subnormals, and merging them is exact and free of order. From the exponents one sees what any
format would lose: the share below its smallest value or above its largest needs no second look at the tensor.

bf16 and fp16 have 65,536 bit patterns, so such a tensor is counted by pattern once (one bincount) and everything else
follows from the counts, exactly; `bit_pattern_counts` gives them away too, since the error of any element-wise format
on the tensor is a sum over patterns. Other dtypes go through float64, which holds float32 and narrower exactly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.quantscope.formats import slabs

PATTERNS = 1 << 16
PATTERN_DTYPES = (torch.bfloat16, torch.float16)
_COUNT_CHUNK = 1 << 20  # elements: a bincount allocates 65,536 counters, which a smaller chunk would not be worth
_WIDE_CHUNK = 1 << 18  # elements: 2 MB of float64
_FLOAT64_FRACTION_BITS = 52
_FLOAT64_BIAS = 1023
_FLOAT64_FIELDS = 2048

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TensorStatistics:
    """Sum-mergeable summary of a tensor.

    Attributes:
        count: Elements.
        zero: Elements that are +0 or -0.
        nan: Elements that are NaN.
        inf: Elements that are +Inf or -Inf.
        min: Smallest finite element; None if there is none.
        max: Largest finite element; None if there is none.
        sum: Sum of the finite elements, in float64.
        sum_squares: Sum of the squares of the finite elements, in float64.
        exponents: floor(log2 |x|) of the finite non-zero elements -> how many, ascending.
    """

    count: int = 0
    zero: int = 0
    nan: int = 0
    inf: int = 0
    min: float | None = None
    max: float | None = None
    sum: float = 0.0
    sum_squares: float = 0.0
    exponents: Mapping[int, int]

    @property
    def finite(self) -> int:
        """Elements that are neither NaN nor Inf."""
        return self.count - self.nan - self.inf

    @property
    def amax(self) -> float | None:
        """Largest finite magnitude; None if there is none."""
        return None if self.min is None or self.max is None else max(-self.min, self.max, 0.0)

    @property
    def mean(self) -> float | None:
        """Mean of the finite elements; None if there are none."""
        return self.sum / self.finite if self.finite else None

    @property
    def rms(self) -> float | None:
        """Root of the mean square of the finite elements; None if there are none."""
        return math.sqrt(self.sum_squares / self.finite) if self.finite else None

    @property
    def std(self) -> float | None:
        """Standard deviation (of the population) of the finite elements; None if there are none."""
        if self.mean is None:
            return None
        return math.sqrt(max(0.0, self.sum_squares / self.finite - self.mean**2))

    def to_json(self) -> dict[str, Any]:
        """A plain dict of what JSON can hold: exponents as strings, a sum that overflowed float64 as None."""
        return {
            "count": self.count,
            "zero": self.zero,
            "nan": self.nan,
            "inf": self.inf,
            "min": self.min,
            "max": self.max,
            "sum": self.sum if math.isfinite(self.sum) else None,
            "sum_squares": self.sum_squares if math.isfinite(self.sum_squares) else None,
            "exponents": {str(exponent): count for exponent, count in self.exponents.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorStatistics:
        """The inverse of `to_json`; a sum that overflowed comes back as NaN."""
        fields = dict(data)
        fields["exponents"] = {int(exponent): count for exponent, count in data["exponents"].items()}
        for name in ("sum", "sum_squares"):
            fields[name] = math.nan if data[name] is None else data[name]
        return cls(**fields)


def merge(a: TensorStatistics, b: TensorStatistics) -> TensorStatistics:
    """The statistics of both tensors together."""
    exponents = Counter(a.exponents)
    exponents.update(b.exponents)
    return TensorStatistics(
        count=a.count + b.count,
        zero=a.zero + b.zero,
        nan=a.nan + b.nan,
        inf=a.inf + b.inf,
        min=min((value for value in (a.min, b.min) if value is not None), default=None),
        max=max((value for value in (a.max, b.max) if value is not None), default=None),
        sum=a.sum + b.sum,
        sum_squares=a.sum_squares + b.sum_squares,
        exponents=dict(sorted(exponents.items())),
    )


def measure(tensor: Tensor) -> TensorStatistics:
    """The statistics of a tensor of any real dtype, shape and device, read once and in bounded memory.

    Integers are taken as float64 (exact up to 2^53), booleans as 0 and 1.

    Raises:
        TypeError: The dtype has no real values (complex, packed).
    """
    x = tensor.detach()
    if x.dtype in PATTERN_DTYPES:
        return _from_patterns(bit_pattern_counts(x), x.dtype)
    total = TensorStatistics(exponents={})
    for chunk in torch.split(_flat(x), _WIDE_CHUNK):
        total = merge(total, _measure_wide(_to_float64(chunk)))
    return total


def bit_pattern_counts(tensor: Tensor) -> Counts:
    """How often each of the 65,536 bit patterns occurs in a bf16 or fp16 tensor: int64 [65536], by unsigned pattern.

    Raises:
        TypeError: Another dtype.
    """
    if tensor.dtype not in PATTERN_DTYPES:
        raise TypeError(f"bit patterns of {tensor.dtype} can not be counted: the tensor must be bfloat16 or float16")
    bits = _flat(tensor.detach()).view(torch.int16)
    counts = torch.zeros(PATTERNS, dtype=torch.int64, device=bits.device)
    for chunk in torch.split(bits, _COUNT_CHUNK):
        counts += torch.bincount(chunk.int().bitwise_and_(PATTERNS - 1), minlength=PATTERNS)
    result: Counts = counts.cpu().numpy()
    return result


def bit_patterns(dtype: torch.dtype) -> Tensor:
    """The value of each bit pattern of bf16 or fp16: [65536] of that dtype, NaNs and Infs at their places."""
    return torch.arange(PATTERNS, dtype=torch.int32).to(torch.int16).view(dtype)


def _from_patterns(counts: Counts, dtype: torch.dtype) -> TensorStatistics:
    present = np.flatnonzero(counts)
    counts, values = counts[present], _pattern_values(dtype)[present]
    nan, inf = np.isnan(values), np.isinf(values)
    usable = ~(nan | inf)
    finite, finite_counts = values[usable], counts[usable]
    nonzero = finite != 0
    exponents: Counter[int] = Counter()
    for exponent, count in zip(np.frexp(finite[nonzero])[1] - 1, finite_counts[nonzero], strict=True):
        exponents[int(exponent)] += int(count)
    return TensorStatistics(
        count=int(counts.sum()),
        zero=int(finite_counts[~nonzero].sum()),
        nan=int(counts[nan].sum()),
        inf=int(counts[inf].sum()),
        min=float(finite.min()) if finite.size else None,
        max=float(finite.max()) if finite.size else None,
        sum=float((finite * finite_counts).sum()),
        sum_squares=float((finite * finite * finite_counts).sum()),
        exponents=dict(sorted(exponents.items())),
    )


@cache
def _pattern_values(dtype: torch.dtype) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = bit_patterns(dtype).double().numpy()
    return values


def _measure_wide(x: Tensor) -> TensorStatistics:
    """The statistics of a flat float64 tensor."""
    fields = torch.bincount(
        (x.view(torch.int64) >> _FLOAT64_FRACTION_BITS).bitwise_and_(_FLOAT64_FIELDS - 1), minlength=_FLOAT64_FIELDS
    ).tolist()
    nan = 0
    if fields[-1]:
        nan = int(torch.isnan(x).sum())
        x = x[torch.isfinite(x)]
    subnormal = Counter[int]()
    zero = 0
    if fields[0]:
        small = x[x.abs() < torch.finfo(torch.float64).smallest_normal]
        zero = int((small == 0).sum())
        subnormal.update((torch.frexp(small[small != 0]).exponent - 1).tolist())
    smallest, largest = torch.aminmax(x) if x.numel() else (None, None)
    normal = {field - _FLOAT64_BIAS: n for field, n in enumerate(fields[1:-1], start=1) if n}
    return TensorStatistics(
        count=sum(fields),
        zero=zero,
        nan=nan,
        inf=fields[-1] - nan,
        min=None if smallest is None else float(smallest),
        max=None if largest is None else float(largest),
        sum=float(x.sum()),
        sum_squares=float(torch.dot(x, x)),
        exponents=dict(sorted(subnormal.items())) | normal,
    )


def _flat(x: Tensor) -> Tensor:
    """The elements in any order, without a copy where there are no gaps or overlaps."""
    return slabs.flat_view(x).flatten() if slabs.is_dense(x) else x.reshape(-1)


def _to_float64(x: Tensor) -> Tensor:
    if x.is_complex():
        raise TypeError(f"a tensor of {x.dtype} can not be measured: it has no real values")
    try:
        return x.to(torch.float64)
    except (RuntimeError, NotImplementedError) as error:
        raise TypeError(f"a tensor of {x.dtype} can not be measured: it has no real values") from error
