"""Fake quantisation on the CPU by the C++ kernels of `cpp/`: the record's numbers and the tensors' addresses go in.

The kernels know no format by name. `Rule` is what a record asks of them, and a record that asks for more than they can
(`can_run`) is left to the torch backend.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from megatron.quantscope.formats import slabs
from megatron.quantscope.formats.catalog import E4M3
from megatron.quantscope.formats.codes import encode_table
from megatron.quantscope.formats.cpp_build import library
from megatron.quantscope.formats.job import Job
from megatron.quantscope.formats.records import Format
from megatron.quantscope.formats.scales import tensor_amax, tensor_scale

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""In the order of the kernels' own numbers for them."""
_LARGEST_DTYPES = (torch.bfloat16, torch.float32)  # that qs_largest takes
_BANDS = 4
_BLOCK_UNIT, _LARGEST_BLOCK = 16, 64  # elements: whole vectors of float32, and what the staging buffers hold
_FLOAT32_MANTISSA, _FLOAT32_EMIN, _FLOAT32_EMAX = 23, -126, 127
_BF16_MANTISSA = 7
_LARGEST_DISTANCE = 30  # |exponent| that the tables of a tapered format reach
_ELEMENTS_A_THREAD = 1 << 16  # less is not worth waking one up
_STREAM_BYTES = 8 << 20  # a result that would only push everything else out of the cache
_SCALES: Mapping[tuple[str | None, str | None], int] = {
    (None, None): 0,
    ("e8m0", "floor"): 1,
    ("e8m0", "rceil"): 2,
    ("fp32", None): 3,
    ("e4m3+fp32", None): 4,
}


class Rule(ctypes.Structure):
    """`Rule` of cpp/rule.h."""

    _fields_ = [
        ("half_away", ctypes.c_int32),
        ("mantissa_bits", ctypes.c_int32),
        ("emin", ctypes.c_int32),
        ("emax", ctypes.c_int32),
        ("max", ctypes.c_float),
        ("smallest", ctypes.c_float),
        ("beyond", ctypes.c_float),
        ("negative_zero", ctypes.c_int32),
        ("limit", ctypes.c_int32 * _BANDS),
        ("drop", ctypes.c_int32 * _BANDS),
        ("scale", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("encode", ctypes.c_float),
        ("decode", ctypes.c_float),
        ("block_max", ctypes.c_float),
        ("block_mantissa_bits", ctypes.c_int32),
        ("block_emin", ctypes.c_int32),
    ]


class Call(ctypes.Structure):
    """`Call` of cpp/tensors.h."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("stored", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("outer", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("stream", ctypes.c_int32),
    ]


@cache
def can_run(fmt: Format) -> bool:
    """Whether the kernels have what the record asks for; all of `FORMATS` they have."""
    if fmt.is_tapered:
        drops_fit = len(fmt.bands) <= _BANDS and fmt.bands[-1].limit < _LARGEST_DISTANCE
        rounds = fmt.rounding == "half_away" and fmt.mantissa_bits < _BF16_MANTISSA
        return drops_fit and rounds and fmt.scale is None
    block_fits = fmt.block is None or (fmt.block % _BLOCK_UNIT == 0 and fmt.block <= _LARGEST_BLOCK)
    is_short_float32 = fmt.scale is None and fmt.emin == _FLOAT32_EMIN
    constant_fits = fmt.emin >= _FLOAT32_EMIN and fmt.emax + 1 + _FLOAT32_MANTISSA - fmt.mantissa_bits <= _FLOAT32_EMAX
    plain = fmt.rounding == "half_even" and fmt.has_negative_zero
    return plain and block_fits and fmt.mantissa_bits < _FLOAT32_MANTISSA and (constant_fits or is_short_float32)


def run(x: Tensor, out: Tensor, job: Job) -> None:
    """Quantise and dequantise dense x into `out`, which has its shape, dtype and strides, or is x."""
    call, rule = call_for(x, _blocks_axis(job)), rule_for(x, job)
    call.y = out.data_ptr()
    call.stream = out.data_ptr() != x.data_ptr() and x.numel() * x.element_size() >= _STREAM_BYTES
    kernels().qs_quantize(ctypes.byref(call), ctypes.byref(rule))


def run_both(x: Tensor, along_row: Tensor, down_column: Tensor, job: Job) -> None:
    """Quantise a contiguous matrix with blocks along its last axis and with blocks along its first."""
    call, rule = call_for(x, 0), rule_for(x, job)
    call.y = along_row.data_ptr()
    call.stream = x.numel() * x.element_size() >= _STREAM_BYTES
    address = ctypes.c_void_p(down_column.data_ptr())
    if not kernels().qs_quantize_both(ctypes.byref(call), address, ctypes.byref(rule)):
        run(x, along_row, replace(job, axis=1))
        run(x, down_column, replace(job, axis=0))


def encode(x: Tensor, codes: Tensor, scales: Tensor | None, job: Job) -> None:
    """Write the codes of dense x's elements, uint8 of its shape and strides, and the bytes of its block scales.

    `scales` has x's shape but for the axis, where it has one byte a block, in the same order of dimensions.
    """
    call, rule = call_for(x, _blocks_axis(job)), rule_for(x, job)
    call.codes, call.table = codes.data_ptr(), encode_table(job.fmt).data_ptr()
    call.stored = None if scales is None else scales.data_ptr()
    kernels().qs_quantize(ctypes.byref(call), ctypes.byref(rule))


def call_for(x: Tensor, axis: int | None) -> Call:
    """A call on a dense tensor, with blocks along an axis or without blocks."""
    outer, length, inner = (1, x.numel(), 1) if axis is None else slabs.around_axis(x, axis)
    return Call(
        x=x.data_ptr(),
        outer=outer,
        length=length,
        inner=inner,
        dtype=DTYPES.index(x.dtype),
        threads=max(1, min(torch.get_num_threads(), x.numel() // _ELEMENTS_A_THREAD)),
    )


def rule_for(x: Tensor, job: Job) -> Rule:
    """What the record asks for, with the scale of the tensor if it has one."""
    rule = Rule.from_buffer_copy(_rule_of_format(job.fmt, job.scale_rule, job.saturate))
    if job.fmt.has_tensor_scale:
        largest = job.fmt.max * (1 if job.fmt.block is None else E4M3.max)
        scale = tensor_scale(_amax(x, job), largest)
        rule.encode, rule.decode = float(scale), float(1.0 / scale)
    return rule


@cache
def kernels() -> ctypes.CDLL:
    """The library; `backends` has asked whether there is one."""
    loaded = library()
    assert loaded is not None
    for name in ("qs_quantize", "qs_count", "qs_count_blocks", "qs_blocks", "qs_measure"):
        getattr(loaded, name).restype = None
    loaded.qs_quantize_both.restype = ctypes.c_bool
    loaded.qs_largest.restype = ctypes.c_float
    return loaded


def _amax(x: Tensor, job: Job) -> Tensor:
    if job.amax is None and x.dtype in _LARGEST_DTYPES:
        largest = kernels().qs_largest(ctypes.byref(call_for(x, None)))
        return torch.tensor(largest, dtype=torch.float32, device="cpu")
    return tensor_amax(x, job.amax)


def _blocks_axis(job: Job) -> int | None:
    return None if job.fmt.block is None else job.axis


@cache
def _rule_of_format(fmt: Format, scale_rule: str, saturate: bool) -> Rule:
    bands = [*fmt.bands, *[fmt.bands[-1]] * (_BANDS - len(fmt.bands))] if fmt.bands else []
    bits = [band.mantissa_bits for band in bands]
    return Rule(
        half_away=fmt.rounding == "half_away",
        mantissa_bits=min(fmt.mantissa_bits, _FLOAT32_MANTISSA),
        emin=fmt.emin,
        emax=fmt.emax,
        max=fmt.max,
        smallest=fmt.min_subnormal,
        beyond=fmt.max if saturate else math.inf if fmt.has_inf else math.nan,
        negative_zero=fmt.has_negative_zero,
        limit=(ctypes.c_int32 * _BANDS)(*[band.limit for band in bands]),
        drop=(ctypes.c_int32 * _BANDS)(*[a - b for a, b in zip(bits, [*bits[1:], *bits[-1:]], strict=True)]),
        scale=_SCALES[fmt.scale, scale_rule if fmt.scale == "e8m0" else None],
        block=fmt.block or 0,
        encode=1.0,
        decode=1.0,
        block_max=E4M3.max,
        block_mantissa_bits=E4M3.mantissa_bits,
        block_emin=E4M3.emin,
    )
