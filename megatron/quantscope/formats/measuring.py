"""Measure a tensor: its statistics, in one read and in bounded memory.

On the CPU the C++ kernels count bf16, fp16 and float32. Without them bf16 and fp16 are counted by bit pattern, and
other dtypes go through float64, which holds float32 and narrower exactly. They all give the same numbers, exactly.
On CUDA, Triton kernels count what fits a float32: sum and sum of squares are those of float64 there
(`triton_statistics` states the bound), and the other figures are exact.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from megatron.quantscope.formats import slabs
from megatron.quantscope.formats.backends import BACKENDS
from megatron.quantscope.formats.exact import ExactSum
from megatron.quantscope.formats.patterns import PATTERN_DTYPES, bit_pattern_counts, statistics_of_patterns
from megatron.quantscope.formats.statistics import TensorStatistics, merge

_WIDE_CHUNK = 1 << 18  # elements: 2 MB of float64
_FRACTION_BITS, _BIAS, _FIELDS = 52, 1023, 2048  # of float64


def measure(tensor: Tensor) -> TensorStatistics:
    """The statistics of a tensor of any real dtype, shape and device.

    Integers are taken as float64 (exact up to 2^53), booleans as 0 and 1.

    Raises:
        TypeError: The dtype has no real values (complex, packed).
    """
    x = tensor.detach()
    if x.device.type == "cpu" and x.numel() and BACKENDS["cpp"].lacks() is None:
        from megatron.quantscope.formats import cpp_measure

        if x.dtype in cpp_measure.DTYPES:
            return cpp_measure.statistics_of(slabs.flat(x))
    if x.is_cuda and BACKENDS["triton"].lacks() is None:
        from megatron.quantscope.formats import triton_statistics

        if x.dtype in triton_statistics.DTYPES:
            return triton_statistics.statistics_of(x)
    return plain_statistics(x)


def plain_statistics(x: Tensor) -> TensorStatistics:
    """The same by torch and numpy, on any device."""
    if x.dtype in PATTERN_DTYPES:
        return statistics_of_patterns(bit_pattern_counts(x), x.dtype)
    total = TensorStatistics(exponents={})
    for chunk in torch.split(slabs.flat(x), _WIDE_CHUNK):
        total = merge(total, _measure_wide(_to_float64(chunk)))
    return total


def _measure_wide(x: Tensor) -> TensorStatistics:
    """The statistics of a flat float64 tensor."""
    fields = torch.bincount(
        (x.view(torch.int64) >> _FRACTION_BITS).bitwise_and_(_FIELDS - 1), minlength=_FIELDS
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
    normal = {field - _BIAS: n for field, n in enumerate(fields[1:-1], start=1) if n}
    values = x.cpu().numpy()
    with np.errstate(over="ignore"):  # a square beyond float64 leaves no number
        squares = values * values
    return TensorStatistics(
        count=sum(fields),
        zero=zero,
        nan=nan,
        inf=fields[-1] - nan,
        min=None if smallest is None else float(smallest) + 0.0,  # -0 is 0
        max=None if largest is None else float(largest) + 0.0,
        exact_sum=ExactSum.of(values),
        exact_squares=ExactSum.of(squares),
        exponents=dict(sorted(subnormal.items())) | normal,
    )


def _to_float64(x: Tensor) -> Tensor:
    if x.is_complex():
        raise TypeError(f"a tensor of {x.dtype} can not be measured: it has no real values")
    try:
        return x.to(torch.float64)
    except (RuntimeError, NotImplementedError) as error:
        raise TypeError(f"a tensor of {x.dtype} can not be measured: it has no real values") from error
