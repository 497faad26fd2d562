"""Statistics of CPU tensors by the C++ kernels: `cpp/statistics.h` counts, `cpp/errors.h` compares."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.quantscope.formats.blocks import DEPTHS, EXPONENTS, FRACTION_CLASSES, LEAST_EXPONENT, BlockCounts
from megatron.quantscope.formats.catalog import MX_BLOCK
from megatron.quantscope.formats.cpp_backend import Rule, call_for, kernels, rule_for
from megatron.quantscope.formats.damage import FormatDamage
from megatron.quantscope.formats.exact import ExactSum
from megatron.quantscope.formats.job import Job
from megatron.quantscope.formats.statistics import TensorStatistics

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
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
        ("exponents", ctypes.c_int64 * EXPONENTS),
        ("first", ctypes.c_int32),
        ("last", ctypes.c_int32),
        ("min", ctypes.c_float),
        ("max", ctypes.c_float),
        ("sum", _DIGITS),
        ("squares", _DIGITS),
    ]


class Blocks(ctypes.Structure):
    """`BlockCounts` of cpp/blocks.h."""

    _fields_ = [
        ("zero", ctypes.c_int64),
        ("nonfinite", ctypes.c_int64),
        ("amax", ctypes.c_int64 * FRACTION_CLASSES * EXPONENTS),
        ("depths", ctypes.c_int64 * DEPTHS),
    ]


class Damage(ctypes.Structure):
    """`Damage` of cpp/errors.h."""

    _fields_ = [
        ("underflow", ctypes.c_int64),
        ("saturated", ctypes.c_int64),
        ("lost", ctypes.c_int64),
        ("dead", ctypes.c_int64),
        ("error", Exact),
    ]


class BlockAddresses(ctypes.Structure):
    """`BlockFigures` of cpp/errors.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in _BLOCK_FIELDS]


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


def block_counts_of(x: Tensor, axis: int, depths: bool) -> BlockCounts:
    """Count the blocks of a dense tensor that is not empty."""
    call, found = call_for(x, axis), Blocks()
    kernels().qs_blocks(ctypes.byref(call), ctypes.c_bool(depths), ctypes.byref(found))
    return BlockCounts(
        total=call.outer * -(-call.length // MX_BLOCK) * call.inner,
        zero=found.zero,
        nonfinite=found.nonfinite,
        amax=np.ctypeslib.as_array(found.amax).copy(),
        depths=np.ctypeslib.as_array(found.depths).copy() if depths else None,
    )


def damage_of(
    x: Tensor, jobs: Sequence[Job], block: int, figures: Mapping[str, Tensor], *, measured: bool
) -> tuple[TensorStatistics | None, list[FormatDamage]]:
    """What formats do to a dense tensor, from one read of it; and its statistics if it is to be `measured`.

    Args:
        x: Not empty.
        jobs: The formats, and the axis of the blocks; more than one only of formats with E8M0 scales.
        block: Elements of a block, also of a format that has none.
        figures: Where to put the figures of the blocks of a single job, or nothing: `amax` float32, `error` and
            `signal` float64, `underflow`, `saturated` and `lost` uint8; each like `slabs.empty_scales`.
        measured: Whether the statistics are wanted.
    """
    rules, damages = (Rule * len(jobs))(), (Damage * len(jobs))()
    for place, job in enumerate(jobs):
        rules[place] = rule_for(x, job)
        rules[place].block = block
    addresses = BlockAddresses(**{name: t.data_ptr() for name, t in figures.items()})
    call, summary = call_for(x, jobs[0].axis), Summary() if measured else None
    kernels().qs_measure(
        ctypes.byref(call),
        rules,
        len(jobs),
        ctypes.byref(addresses),
        None if summary is None else ctypes.byref(summary),
        damages,
    )
    found = [
        FormatDamage(
            underflow=damage.underflow,
            saturated=damage.saturated,
            lost=damage.lost,
            dead_blocks=damage.dead,
            error=ExactSum.of_limbs(np.ctypeslib.as_array(damage.error)),
        )
        for damage in damages
    ]
    return None if summary is None else _statistics(summary, x.numel()), found


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
            for place, times in enumerate(summary.exponents[first : summary.last], first + LEAST_EXPONENT)
            if times
        },
    )
