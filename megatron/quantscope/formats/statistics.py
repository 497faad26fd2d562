"""What a tensor holds, in a few numbers that add up: over ranks, micro-batches and machines.

    count, zero, nan, inf        how many elements, and how many of each kind (the rest is finite and not zero)
    min, max, sum, sum_squares   over the finite elements
    exponents                    how many finite non-zero elements lie in each binade: floor(log2 |x|) -> count

All of it is exact, subnormals too, and so is merging, in any order. From the exponents one sees what any format would
lose: the share below its smallest value or above its largest needs no second look at the tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.quantscope.formats.exact import ZERO, ExactSum


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
        exact_sum: Sum of the finite elements.
        exact_squares: Sum of the squares of the finite elements; of float64 tensors, of the squares in float64.
        exponents: floor(log2 |x|) of the finite non-zero elements -> how many, ascending.
    """

    count: int = 0
    zero: int = 0
    nan: int = 0
    inf: int = 0
    min: float | None = None
    max: float | None = None
    exact_sum: ExactSum = ZERO
    exact_squares: ExactSum = ZERO
    exponents: Mapping[int, int]

    @property
    def sum(self) -> float:
        """Sum of the finite elements, rounded once."""
        return float(self.exact_sum)

    @property
    def sum_squares(self) -> float:
        """Sum of the squares of the finite elements, rounded once; NaN where a square was beyond float64."""
        return float(self.exact_squares)

    @property
    def finite(self) -> int:
        """Elements that are neither NaN nor Inf."""
        return self.count - self.nan - self.inf

    @property
    def amax(self) -> float | None:
        """Largest finite magnitude; None if there is none."""
        return None if self.min is None or self.max is None else max(0.0, -self.min, self.max)

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
        return math.sqrt(self.exact_sum.variance(self.exact_squares, self.finite)) if self.finite else None

    def to_json(self) -> dict[str, Any]:
        """A plain dict of what JSON can hold: exponents as strings, a sum beyond float64 as None."""
        total, squares = self.sum, self.sum_squares
        return {
            "count": self.count,
            "zero": self.zero,
            "nan": self.nan,
            "inf": self.inf,
            "min": self.min,
            "max": self.max,
            "sum": total if math.isfinite(total) else None,
            "sum_squares": squares if math.isfinite(squares) else None,
            "exponents": {str(exponent): count for exponent, count in self.exponents.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorStatistics:
        """The inverse of `to_json`, but for the sums: they are those of JSON, which were rounded."""
        fields = dict(data)
        fields["exponents"] = {int(exponent): count for exponent, count in data["exponents"].items()}
        for name, exact in (("sum", "exact_sum"), ("sum_squares", "exact_squares")):
            value = fields.pop(name)
            fields[exact] = ExactSum.of_float(math.nan if value is None else value)
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
        exact_sum=a.exact_sum + b.exact_sum,
        exact_squares=a.exact_squares + b.exact_squares,
        exponents=dict(sorted(exponents.items())),
    )


def sqnr_db(signal_squares: float, error_squares: float, lost: int) -> float:
    """The signal to quantisation noise ratio of a tensor, from its sum of squares and that of its errors.

    Inf where nothing changed, -Inf where elements were lost (their error has no bound), NaN where all is zero.
    """
    if lost:
        return -math.inf
    if signal_squares == 0:
        return math.nan
    return 10 * math.log10(signal_squares / error_squares) if error_squares else math.inf
