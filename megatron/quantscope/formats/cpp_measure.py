"""Statistics of CPU tensors by the C++ kernels: `cpp/statistics.h` counts, `cpp/errors.h` compares."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.quantscope.formats.cpp_backend import call_for, kernels, rule_for
from megatron.quantscope.formats.exact import ExactSum
from megatron.quantscope.formats.job import Job
from megatron.quantscope.formats.statistics import TensorStatistics

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LEAST_EXPONENT, _EXPONENTS = -149, 277
_LIMBS = 72
_BLOCK_FIELDS = ("amax", "error", "signal", "underflow", "saturated", "lost")

Exact = ctypes.c_int64 * _LIMBS


class Totals(ctypes.Structure):
    """`Totals` of cpp/statistics.h."""

    _fields_ = [
        ("zero", ctypes.c_int64),
        ("nan", ctypes.c_int64),
        ("inf", ctypes.c_int64),
        ("exponents", ctypes.c_int64 * _EXPONENTS),
        ("min", ctypes.c_float),
        ("max", ctypes.c_float),
        ("sum", Exact),
        ("squares", Exact),
    ]


class Damage(ctypes.Structure):
    """`Damage` of cpp/errors.h."""

    _fields_ = [
        ("underflow", ctypes.c_int64),
        ("saturated", ctypes.c_int64),
        ("lost", ctypes.c_int64),
        ("error", Exact),
    ]


class BlockAddresses(ctypes.Structure):
    """`BlockFigures` of cpp/errors.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in _BLOCK_FIELDS]


@dataclass(frozen=True)
class Found:
    """What `damage_of` finds.

    Attributes:
        statistics: Of the tensor.
        underflow, saturated, lost: Elements.
        error: Sum of the squared errors.
    """

    statistics: TensorStatistics
    underflow: int
    saturated: int
    lost: int
    error: ExactSum


def statistics_of(x: Tensor) -> TensorStatistics:
    """The statistics of a flat tensor that is not empty."""
    totals = Totals(min=math.inf, max=-math.inf)
    kernels().qs_count(ctypes.byref(call_for(x, None)), ctypes.byref(totals))
    return _statistics(totals, x.numel())


def damage_of(x: Tensor, job: Job, block: int, figures: dict[str, Tensor]) -> Found:
    """The statistics of a dense tensor and what a format does to it.

    Args:
        x: Not empty.
        job: The format, and the axis of the blocks.
        block: Elements of a block, also of a format that has none.
        figures: Where to put the figures of blocks, or nothing: `amax` float32, `error` and `signal` float64,
            `underflow`, `saturated` and `lost` uint8; each like `slabs.empty_scales`.
    """
    rule = rule_for(x, job)
    rule.block = block
    addresses = BlockAddresses(**{name: t.data_ptr() for name, t in figures.items()})
    totals, damage = Totals(min=math.inf, max=-math.inf), Damage()
    arguments = (call_for(x, job.axis), rule, addresses, totals, damage)
    kernels().qs_measure(*map(ctypes.byref, arguments))
    return Found(
        statistics=_statistics(totals, x.numel()),
        underflow=damage.underflow,
        saturated=damage.saturated,
        lost=damage.lost,
        error=_exact(damage.error),
    )


def _statistics(totals: Totals, count: int) -> TensorStatistics:
    exponents = np.ctypeslib.as_array(totals.exponents)
    any_finite = totals.nan + totals.inf < count
    return TensorStatistics(
        count=count,
        zero=totals.zero,
        nan=totals.nan,
        inf=totals.inf,
        min=totals.min + 0.0 if any_finite else None,  # -0 is 0
        max=totals.max + 0.0 if any_finite else None,
        exact_sum=_exact(totals.sum),
        exact_squares=_exact(totals.squares),
        exponents={_LEAST_EXPONENT + int(place): int(exponents[place]) for place in np.flatnonzero(exponents)},
    )


def _exact(limbs: ctypes.Array[ctypes.c_int64]) -> ExactSum:
    return ExactSum.of_limbs(np.ctypeslib.as_array(limbs))
