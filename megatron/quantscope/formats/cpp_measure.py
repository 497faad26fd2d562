"""Statistics of CPU tensors by the C++ kernels: `cpp/statistics.h` counts, `cpp/errors.h` compares."""

from __future__ import annotations

import ctypes
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
_DIGITS = ctypes.c_uint32 * _LIMBS
_BLOCK_FIELDS = ("amax", "error", "signal", "underflow", "saturated", "lost")

Exact = ctypes.c_int64 * _LIMBS


class Summary(ctypes.Structure):
    """`Summary` of cpp/totals.h."""

    _fields_ = [
        ("zero", ctypes.c_int64),
        ("nan", ctypes.c_int64),
        ("inf", ctypes.c_int64),
        ("exponents", ctypes.c_int64 * _EXPONENTS),
        ("first", ctypes.c_int32),
        ("last", ctypes.c_int32),
        ("min", ctypes.c_float),
        ("max", ctypes.c_float),
        ("sum", _DIGITS),
        ("squares", _DIGITS),
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
    summary = Summary()
    kernels().qs_count(ctypes.byref(call_for(x, None)), ctypes.byref(summary))
    return _statistics(summary, x.numel())


def statistics_and_blocks_of(x: Tensor, fields: Tensor) -> TensorStatistics:
    """The statistics of a contiguous tensor that is not empty and, into `fields`, the map of its blocks."""
    call = call_for(x, x.dim() - 1)
    summary = Summary()
    kernels().qs_count_blocks(ctypes.byref(call), ctypes.c_void_p(fields.data_ptr()), ctypes.byref(summary))
    return _statistics(summary, x.numel())


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
    summary, damage = Summary(), Damage()
    arguments = (call_for(x, job.axis), rule, addresses, summary, damage)
    kernels().qs_measure(*map(ctypes.byref, arguments))
    return Found(
        statistics=_statistics(summary, x.numel()),
        underflow=damage.underflow,
        saturated=damage.saturated,
        lost=damage.lost,
        error=ExactSum.of_limbs(np.ctypeslib.as_array(damage.error)),
    )


def _statistics(summary: Summary, count: int) -> TensorStatistics:
    any_finite = summary.nan + summary.inf < count
    first = summary.first
    return TensorStatistics(
        count=count,
        zero=summary.zero,
        nan=summary.nan,
        inf=summary.inf,
        min=summary.min + 0.0 if any_finite else None,  # -0 is 0
        max=summary.max + 0.0 if any_finite else None,
        exact_sum=ExactSum(int.from_bytes(bytes(summary.sum), "little", signed=True)),
        exact_squares=ExactSum(int.from_bytes(bytes(summary.squares), "little", signed=True)),
        exponents={
            place: times
            for place, times in enumerate(summary.exponents[first : summary.last], first + _LEAST_EXPONENT)
            if times
        },
    )
