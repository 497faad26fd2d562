"""The Triton kernels that measure a tensor: one read of it, and a row of figures.

`count_kernel` runs as a fixed number of programs that share the tiles of a tensor. Each keeps its own figures, in
registers, and leaves them in a row of its own; `total_kernel` adds the rows up. Nothing is added by atomics, and the
number of programs does not depend on the GPU, so a tensor gives the same numbers always and everywhere.

A row is COUNTS whole numbers and SUMS floats:

    counts[f]                 elements whose exponent field as a float32 is f; 255: Inf and NaN
                              (in field 0 are zeros, subnormals, and the lanes of a tile that hold no element)
    counts[FIELDS + b]        float32 subnormals with floor(log2 |x|) = b - 149
    counts[FIELDS + INF_BIN]  Inf
    sums                      sum and sum of squares in float64; least and largest; all of the finite elements

The last two kinds of counts take a second histogram, which only tiles that have such elements pay for.
"""

# mypy: disallow-untyped-decorators=False
# triton.jit has no types: what it decorates is Triton's language, not Python.

from __future__ import annotations

import triton
import triton.language as tl

from megatron.quantscope.formats.rounding import FRACTION_BITS
from megatron.quantscope.formats.triton_rounding import magnitude_bits, widen

FIELDS, ODD_BINS, INF_BIN = 256, 32, 24
COUNTS, SUMS = FIELDS + ODD_BINS, 4

_FIELDS, _ODD_BINS, _INF_BIN = tl.constexpr(FIELDS), tl.constexpr(ODD_BINS), tl.constexpr(INF_BIN)
_COUNTS, _SUMS = tl.constexpr(COUNTS), tl.constexpr(SUMS)
_NO_BIN = tl.constexpr(ODD_BINS - 1)
_FRACTION, _BIAS = tl.constexpr(FRACTION_BITS), tl.constexpr(127)
_INFINITY_BITS, _SMALLEST_NORMAL = tl.constexpr(0x7F800000), tl.constexpr(1 << FRACTION_BITS)
_INFINITY = tl.constexpr(float("inf"))
_ROWS, _COLUMNS = tl.constexpr(64), tl.constexpr(32)  # of a tile of `total_kernel`


@triton.jit(do_not_specialize=["blocks"])
def count_kernel(
    x_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    fields_ptr: tl.tensor,
    blocks: tl.tensor,
    length: tl.tensor,
    row_stride: tl.tensor,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_ROWS: tl.constexpr,
) -> None:
    """Count `blocks` blocks of BLOCK elements; and their exponent fields, if there is a `fields_ptr`.

    IN_ROWS: the blocks lie in rows of `length` elements, the last of each may be short, and a row begins `row_stride`
    elements after the one before. Otherwise all is one row of `length` elements.
    """
    program = tl.program_id(0)
    block, element = tl.arange(0, BLOCKS)[:, None], tl.arange(0, BLOCK)[None, :]
    fields, odd = tl.zeros([_FIELDS], tl.int32), tl.zeros([_ODD_BINS], tl.int32)
    sums, squares = tl.zeros([BLOCKS, BLOCK], tl.float64), tl.zeros([BLOCKS, BLOCK], tl.float64)
    least = tl.full([BLOCKS, BLOCK], _INFINITY, tl.float32)
    largest = tl.full([BLOCKS, BLOCK], -_INFINITY, tl.float32)
    for tile in range(program, tl.cdiv(blocks, BLOCKS), tl.num_programs(0)):
        first = (tl.zeros((), tl.int64) + tile) * BLOCKS
        if IN_ROWS:
            start, offsets, inside = _tile_of_rows(first, block, element, length, row_stride, BLOCK)
            inside = inside & (block < blocks - first)
        else:
            start = first * BLOCK
            offsets = block * BLOCK + element
            inside = offsets < length - start
        x = widen(tl.load(x_ptr + start + offsets, mask=inside, other=0))
        a = magnitude_bits(x)
        fields += tl.histogram(tl.reshape(a >> _FRACTION, [BLOCKS * BLOCK]), _FIELDS)
        is_odd = ((a > 0) & (a < _SMALLEST_NORMAL)) | (a == _INFINITY_BITS)
        if tl.max(is_odd.to(tl.int32)) > 0:
            odd += tl.histogram(tl.reshape(tl.where(is_odd, _odd_bin(a), _NO_BIN), [BLOCKS * BLOCK]), _ODD_BINS)
        finite = inside & (a < _INFINITY_BITS)
        least = tl.minimum(least, tl.where(finite, x, _INFINITY))
        largest = tl.maximum(largest, tl.where(finite, x, -_INFINITY))
        wide = tl.where(finite, x, 0.0).to(tl.float64)
        sums += wide
        squares += wide * wide
        if fields_ptr is not None:
            field = tl.max(a, axis=1, keep_dims=True) >> _FRACTION
            tl.store(fields_ptr + first + block, field.to(tl.uint8), mask=block < blocks - first)
    row = counts_ptr + program * _COUNTS
    tl.store(row + tl.arange(0, _FIELDS), fields)
    tl.store(row + _FIELDS + tl.arange(0, _ODD_BINS), odd)
    tl.store(sums_ptr + program * _SUMS, tl.sum(sums))
    tl.store(sums_ptr + program * _SUMS + 1, tl.sum(squares))
    tl.store(sums_ptr + program * _SUMS + 2, tl.min(least).to(tl.float64))
    tl.store(sums_ptr + program * _SUMS + 3, tl.max(largest).to(tl.float64))


@triton.jit
def _tile_of_rows(
    first: tl.tensor,
    block: tl.tensor,
    element: tl.tensor,
    length: tl.tensor,
    row_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(offset of a tile, offsets in it, which of them are in a row) of blocks from `first` on."""
    blocks_per_row = tl.cdiv(length, BLOCK)
    wide_stride = tl.zeros((), tl.int64) + row_stride
    row, first_in_row = first // blocks_per_row, (first % blocks_per_row).to(tl.int32)
    later_row = (first_in_row + block) // blocks_per_row
    in_row = (first_in_row + block) % blocks_per_row
    start = row * wide_stride + first_in_row.to(tl.int64) * BLOCK
    offsets = later_row * wide_stride + (in_row - first_in_row) * BLOCK + element
    return start, offsets, element < length - in_row.to(tl.int64) * BLOCK


@triton.jit
def _odd_bin(a: tl.tensor) -> tl.tensor:
    """The bin of each subnormal or infinite magnitude, int32."""
    binade = (a.to(tl.float32).to(tl.int32, bitcast=True) >> _FRACTION) - _BIAS  # floor(log2) of the whole number
    return tl.where(a == _INFINITY_BITS, _INF_BIN, binade)


@triton.jit(do_not_specialize=["programs"])
def total_kernel(
    counts_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    total_counts_ptr: tl.tensor,
    total_sums_ptr: tl.tensor,
    programs: tl.tensor,
) -> None:
    """Add up the rows of `programs` programs: the first COUNTS / 32 programs take counts, and the last one sums."""
    part = tl.program_id(0)
    row = tl.arange(0, _ROWS)
    if part < _COUNTS // _COLUMNS:
        column = part * _COLUMNS + tl.arange(0, _COLUMNS)
        counts = tl.zeros([_COLUMNS], tl.int64)
        for start in range(0, programs, _ROWS):
            offsets = (start + row)[:, None] * _COUNTS + column[None, :]
            found = tl.load(counts_ptr + offsets, mask=(start + row)[:, None] < programs, other=0)
            counts += tl.sum(found.to(tl.int64), axis=0)
        tl.store(total_counts_ptr + column, counts)
    else:
        sums, squares = tl.zeros([_ROWS], tl.float64), tl.zeros([_ROWS], tl.float64)
        least, largest = tl.full([_ROWS], _INFINITY, tl.float64), tl.full([_ROWS], -_INFINITY, tl.float64)
        for start in range(0, programs, _ROWS):
            own, inside = sums_ptr + (start + row) * _SUMS, start + row < programs
            sums += tl.load(own, mask=inside, other=0.0)
            squares += tl.load(own + 1, mask=inside, other=0.0)
            least = tl.minimum(least, tl.load(own + 2, mask=inside, other=_INFINITY))
            largest = tl.maximum(largest, tl.load(own + 3, mask=inside, other=-_INFINITY))
        tl.store(total_sums_ptr, tl.sum(sums))
        tl.store(total_sums_ptr + 1, tl.sum(squares))
        tl.store(total_sums_ptr + 2, tl.min(least))
        tl.store(total_sums_ptr + 3, tl.max(largest))
