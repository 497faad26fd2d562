"""The Triton kernels of fake quantisation: every tensor is read once and written once.

A tile is loaded, quantised in registers and stored; the kernels differ in the shape of the tile and so in where the
largest magnitude of a block is found.

    flat     n elements              no block scale: element by element
    rows     [blocks, block]         blocks along the fastest axis; a block is a row, shared by 2 to 8 lanes of a warp
    columns  [block, columns]        blocks along another axis, the memory seen as [outer, length, inner]
    both     [block, blocks, block]  a matrix along both of its axes, two results from one read

One warp holds the whole tile of `columns` and `both`, 64 elements a lane, so that no maximum has to cross warps and no
shared memory is needed. A short last block is a block with a mask: lanes beyond it load zeros, which change no maximum.

Offsets inside a tile are small; what they are added to is 64 bits wide, for tensors of 2^31 elements and more.

`out_ptr` takes the dequantised values, or, where there is a `table_ptr`, the codes of the elements; then `scales_ptr`
takes those of the block scales. The Triton conventions hold: an argument that is None is no part of the kernel. Whether
16 divides a size matters where it decides how wide a load can be; for the other sizes a kernel is not compiled anew.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.quantscope.formats.triton_rounding import (
    code_of,
    magnitude_bits,
    narrow,
    round_magnitude,
    widen,
    with_sign,
)
from megatron.quantscope.formats.triton_scales import block_scale, scale_code, tensor_scale

_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def flat_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    amax_ptr: tl.tensor,
    table_ptr: tl.tensor,
    elements: tl.tensor,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Element by element, with at most a scale for the whole tensor."""
    start = tl.program_id(0).to(tl.int64) * TILE
    offsets = tl.arange(0, TILE)
    inside = offsets < elements - start
    x = widen(tl.load(x_ptr + start + offsets, mask=inside, other=0))
    if SCALE.tensor_max is None:
        y = with_sign(round_magnitude(tl.abs(x), ELEMENT), x, ELEMENT)
    else:
        scale = tensor_scale(amax_ptr, SCALE)
        y = with_sign(round_magnitude(tl.abs(x) * scale, ELEMENT), x, ELEMENT)
        if table_ptr is None:
            y = y * tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    out = narrow(y, out_ptr.dtype.element_ty) if table_ptr is None else code_of(y, table_ptr)
    tl.store(out_ptr + start + offsets, out, mask=inside)


@triton.jit(do_not_specialize=["blocks"])
def rows_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    amax_ptr: tl.tensor,
    table_ptr: tl.tensor,
    scale_table_ptr: tl.tensor,
    blocks: tl.tensor,
    length: tl.tensor,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCKS: tl.constexpr,
    RAGGED: tl.constexpr,
) -> None:
    """Blocks along the fastest axis, of `length` elements: `blocks` of them over all rows.

    If every row is a whole number of blocks (not RAGGED), rows do not matter and `length` is not read.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    block = tl.arange(0, BLOCKS)[:, None]
    element = tl.arange(0, SCALE.block)[None, :]
    inside = block < blocks - first
    if RAGGED:
        blocks_per_row = tl.cdiv(length, SCALE.block)
        row, first_in_row = first // blocks_per_row, (first % blocks_per_row).to(tl.int32)
        later_row = (first_in_row + block) // blocks_per_row
        in_row = (first_in_row + block) % blocks_per_row
        start = row * length + first_in_row.to(tl.int64) * SCALE.block
        offsets = later_row * length + (in_row - first_in_row) * SCALE.block + element
        inside = inside & (element < length - in_row.to(tl.int64) * SCALE.block)
    else:
        start = first * SCALE.block
        offsets = block * SCALE.block + element
    x = widen(tl.load(x_ptr + start + offsets, mask=inside, other=0))
    encode = tensor_scale(amax_ptr, SCALE)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out, scale_codes = _quantise(x, encode, table_ptr, scale_table_ptr, dtype, ELEMENT=ELEMENT, SCALE=SCALE, AXIS=1)
    tl.store(out_ptr + start + offsets, out, mask=inside)
    if scales_ptr is not None:
        tl.store(scales_ptr + first + block, scale_codes, mask=block < blocks - first)


@triton.jit(do_not_specialize=["length"])
def columns_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    amax_ptr: tl.tensor,
    table_ptr: tl.tensor,
    scale_table_ptr: tl.tensor,
    length: tl.tensor,
    inner: tl.tensor,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Blocks along the middle axis of [outer, length, inner]: a program takes one block of some columns."""
    tiles, blocks = tl.cdiv(inner, COLUMNS), tl.cdiv(length, SCALE.block)
    tile, slab = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    outer, block = slab // blocks, slab % blocks
    wide_inner = tl.zeros((), tl.int64) + inner
    first_row, first_column = block.to(tl.int64) * SCALE.block, tile.to(tl.int64) * COLUMNS
    start = (outer.to(tl.int64) * length + first_row) * wide_inner + first_column
    row, column = tl.arange(0, SCALE.block)[:, None], tl.arange(0, COLUMNS)[None, :]
    column_inside = column < inner - first_column
    inside = column_inside & (row < length - first_row)
    offsets = start + row * wide_inner + column
    x = widen(tl.load(x_ptr + offsets, mask=inside, other=0))
    encode = tensor_scale(amax_ptr, SCALE)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out, scale_codes = _quantise(x, encode, table_ptr, scale_table_ptr, dtype, ELEMENT=ELEMENT, SCALE=SCALE, AXIS=0)
    tl.store(out_ptr + offsets, out, mask=inside)
    if scales_ptr is not None:
        tl.store(scales_ptr + slab * wide_inner + first_column + column, scale_codes, mask=column_inside)


@triton.jit(do_not_specialize=["rows"])
def both_kernel(
    x_ptr: tl.tensor,
    along_row_ptr: tl.tensor,
    down_column_ptr: tl.tensor,
    amax_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """A matrix [rows, columns], with blocks along its rows and, from the same tile, with blocks down its columns."""
    tiles = tl.cdiv(columns, BLOCKS * SCALE.block)
    first_row = tl.program_id(0) // tiles * SCALE.block
    first_column = tl.program_id(0) % tiles * (BLOCKS * SCALE.block)
    wide_columns = tl.zeros((), tl.int64) + columns
    start = first_row * wide_columns + first_column
    row = tl.arange(0, SCALE.block)[:, None, None]
    column = tl.arange(0, BLOCKS)[None, :, None] * SCALE.block + tl.arange(0, SCALE.block)[None, None, :]
    inside = (row < rows - first_row) & (column < columns - first_column)
    offsets = start + row * wide_columns + column
    x = widen(tl.load(x_ptr + offsets, mask=inside, other=0))
    encode = tensor_scale(amax_ptr, SCALE)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    out, _ = _quantise(x, encode, None, None, dtype, ELEMENT=ELEMENT, SCALE=SCALE, AXIS=2)
    tl.store(along_row_ptr + offsets, out, mask=inside)
    out, _ = _quantise(x, encode, None, None, dtype, ELEMENT=ELEMENT, SCALE=SCALE, AXIS=0)
    tl.store(down_column_ptr + offsets, out, mask=inside)


@triton.jit
def amax_kernel(x_ptr: tl.tensor, amax_ptr: tl.tensor, elements: tl.tensor, TILE: tl.constexpr) -> None:
    """The bits of the largest magnitude; NaN and Inf win. `amax_ptr`, int32, must be 0 before."""
    offsets = tl.arange(0, TILE)
    largest = tl.zeros((TILE,), tl.int32)
    first, step = tl.program_id(0).to(tl.int64) * TILE, tl.num_programs(0).to(tl.int64) * TILE
    for start in range(first, elements, step):
        x = widen(tl.load(x_ptr + start + offsets, mask=offsets < elements - start, other=0))
        largest = tl.maximum(largest, magnitude_bits(x))
    tl.atomic_max(amax_ptr, tl.max(largest, axis=0), sem="relaxed")


@triton.jit
def _quantise(
    x: tl.tensor,
    encode: tl.tensor,
    table_ptr: tl.tensor,
    scale_table_ptr: tl.tensor,
    dtype: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    AXIS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(values or codes, codes of the scales) of a tile whose blocks run along AXIS; codes if there is a table."""
    amax_bits = tl.max(magnitude_bits(x), axis=AXIS, keep_dims=True)
    inverse, scale, coded = block_scale(amax_bits, encode, SCALE)
    value = with_sign(round_magnitude(tl.abs(x) * inverse, ELEMENT), x, ELEMENT)
    if table_ptr is None:
        out = narrow(value * scale, dtype)
        scale_codes = coded
    else:
        out = tl.where(amax_bits < _INFINITY_BITS, code_of(value, table_ptr), 0).to(tl.uint8)
        scale_codes = scale_code(coded, scale_table_ptr, SCALE)
    return out, scale_codes
