"""Measure a tensor and map its blocks: the exponent of the largest magnitude of every 32 elements, from one read.

A block format gives each block one scale, and the scale follows from the exponent of the block's amax. So this map, a
byte for 32 elements, says what any block format's scales will be, and where in a tensor large and small blocks lie.

    0       only zeros, or values below 2^-126 (float32 subnormals)
    1..254  floor(log2(amax)) + 127, the exponent field of amax as a float32
    255     the block holds NaN or Inf

The C++ kernels read bf16, fp16 and float32 tensors on the CPU once for both, and the Triton kernels those on CUDA;
elsewhere the map is torch's work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.quantscope.formats import slabs
from megatron.quantscope.formats.backends import BACKENDS
from megatron.quantscope.formats.catalog import MX_BLOCK
from megatron.quantscope.formats.measuring import measure
from megatron.quantscope.formats.statistics import TensorStatistics

FIELDS = 256
NOT_FINITE = FIELDS - 1
_BIAS, _FRACTION_BITS, _LARGEST_FIELD = 127, 23, 254
_FLOAT64_BIAS, _FLOAT64_FRACTION_BITS, _FLOAT64_FIELDS = 1023, 52, 2048
_INT64_BITS = 64


def measure_blocks(tensor: Tensor, *, block: int = MX_BLOCK) -> tuple[TensorStatistics, Tensor]:
    """The statistics of a tensor, as of `measure`, and the map of its blocks along the last dimension.

    Args:
        tensor: Of any real dtype, shape and device.
        block: Elements of a block. The last block of a row is short where this does not divide it.

    Returns:
        The statistics; and the map, uint8 on the tensor's device, contiguous, of the tensor's shape with n elements of
        the last dimension replaced by ceil(n / block) blocks; of a tensor without dimensions, [1]. Magnitudes of 2^128
        and more (of float64 and integers: taken as they are, not rounded) count as 254.

    Raises:
        TypeError: The dtype has no real values (complex, packed).
        ValueError: `block` is not positive.
    """
    if block < 1:
        raise ValueError(f"block is {block}: a block has at least one element")
    x = tensor.detach().contiguous()
    rows = x.view(1) if x.dim() == 0 else x
    fields = torch.empty(map_shape(x, block), dtype=torch.uint8, device=x.device)
    if block == MX_BLOCK and x.device.type == "cpu" and x.numel() and BACKENDS["cpp"].lacks() is None:
        from megatron.quantscope.formats import cpp_measure

        if x.dtype in cpp_measure.DTYPES:
            return cpp_measure.statistics_and_blocks_of(rows, fields), fields
    if block == MX_BLOCK and x.is_cuda and BACKENDS["triton"].lacks() is None:
        from megatron.quantscope.formats import triton_statistics

        if x.dtype in triton_statistics.DTYPES:
            return triton_statistics.statistics_and_blocks_of(x)
    statistics = measure(x)  # it also refuses what has no real values
    if x.numel():
        _map(rows, fields, block)
    return statistics, fields


def map_shape(x: Tensor, block: int = MX_BLOCK) -> tuple[int, ...]:
    """The shape of the map of a tensor's blocks: ceil(n / block) for the n elements of the last dimension."""
    return (*x.shape[:-1], -(-x.shape[-1] // block)) if x.dim() else (1,)


def block_counts(fields: Tensor) -> dict[int, int]:
    """How often each value occurs in the map of a tensor's blocks, ascending."""
    counts = torch.bincount(fields.reshape(-1), minlength=FIELDS).tolist()
    return {field: count for field, count in enumerate(counts) if count}


def _map(rows: Tensor, fields: Tensor, block: int) -> None:
    """Fill the map of a contiguous tensor with eager torch, a slab at a time."""
    axis = rows.dim() - 1
    limit = slabs.slab_elements(rows.device)
    views = slabs.blocked_views(rows, axis, block)
    for view, out in zip(views, slabs.scale_views(fields, rows, axis, block), strict=True):
        for index in slabs.slabs(view, limit):
            out[index].copy_(_fields_of(view[index]))


def _fields_of(x: Tensor) -> Tensor:
    """The exponent fields of the blocks [outer, blocks, block, inner] of x: [outer, blocks, 1, inner]."""
    if not x.is_floating_point():
        return _integer_fields(x)
    if x.dtype == torch.float64:
        return _float64_fields(x)
    bits = x.float().view(torch.int32) & torch.iinfo(torch.int32).max
    return bits.amax(dim=slabs.BLOCK_DIM, keepdim=True) >> _FRACTION_BITS


def _float64_fields(x: Tensor) -> Tensor:
    bits = x.view(torch.int64) & torch.iinfo(torch.int64).max
    found = bits.amax(dim=slabs.BLOCK_DIM, keepdim=True) >> _FLOAT64_FRACTION_BITS
    finite = (found - (_FLOAT64_BIAS - _BIAS)).clamp_(0, _LARGEST_FIELD)
    return torch.where(found == _FLOAT64_FIELDS - 1, NOT_FINITE, finite)


def _integer_fields(x: Tensor) -> Tensor:
    """Of integers and booleans, without rounding: no conversion to a float may carry into the next binade."""
    wide = x.view(torch.int64) if x.dtype == torch.uint64 else x.to(torch.int64)
    least, most = torch.aminmax(wide, dim=slabs.BLOCK_DIM, keepdim=True)
    is_whole = least < 0 if x.dtype == torch.uint64 else least == torch.iinfo(torch.int64).min  # |x| has all 64 bits
    amax = torch.maximum(most, -least)
    exponents = torch.frexp((amax & ~(amax >> 1)).double()).exponent - 1  # only the highest bit matters
    exponents = torch.where(is_whole, _INT64_BITS - 1, exponents)
    return torch.where((amax == 0) & ~is_whole, 0, exponents + _BIAS)
