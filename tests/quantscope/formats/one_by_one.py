"""The statistics of a tensor in plain Python: a value at a time, fractions for sums. What `measure` is held against."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import torch

from megatron.quantscope.formats.exact import UNIT_EXPONENT, ExactSum
from megatron.quantscope.formats.statistics import TensorStatistics


def exact(value: Fraction) -> ExactSum:
    """A fraction as `ExactSum` has it; it must be a whole number of the smallest float64."""
    units = value * 2**-UNIT_EXPONENT
    assert units.denominator == 1
    return ExactSum(units.numerator)


def one_by_one(x: torch.Tensor) -> TensorStatistics:
    """Equal elements are taken together, and are one step; squares are those of float64, exact for narrower dtypes."""
    values, counts = np.unique(x.detach().double().flatten().numpy(), return_counts=True)
    times = list(zip(values.tolist(), counts.tolist(), strict=True))
    finite = [(value, count) for value, count in times if math.isfinite(value)]
    exponents = Counter[int]()
    for value, count in finite:
        if value:
            exponents[math.frexp(value)[1] - 1] += count
    squares = [(value * value, count) for value, count in finite]
    no_number = any(math.isinf(square) for square, _ in squares)
    return TensorStatistics(
        count=x.numel(),
        zero=sum(count for value, count in times if value == 0),
        nan=sum(count for value, count in times if math.isnan(value)),
        inf=sum(count for value, count in times if math.isinf(value)),
        min=min((value for value, _ in finite), default=None),
        max=max((value for value, _ in finite), default=None),
        exact_sum=exact(sum((Fraction(value) * count for value, count in finite), Fraction())),
        exact_squares=ExactSum(None)
        if no_number
        else exact(sum((Fraction(square) * count for square, count in squares), Fraction())),
        exponents=dict(sorted(exponents.items())),
    )
