"""Fake quantisation with Triton, on CUDA; on CPU tensors under TRITON_INTERPRET=1, which is how it is tested there.

The host side of `triton_kernels`: it sees a tensor as its memory, chooses the kernel by where the blocks lie in it, and
launches. A call costs one launch, and one more where the format scales by the amax of the whole tensor: it is found on
the device, and nothing waits for it. The constants of a format are made once and kept, as is what Triton compiles.

Tiles: 2,048 elements. 128 lanes share a tile of `flat` and `rows`, each with two or four loads of 16 bytes. One warp
has a tile of `columns` and `both`, whose rows are of 64 elements of bf16: the 128 bytes of a cache line.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from megatron.quantscope.formats import slabs, torch_backend, triton_kernels
from megatron.quantscope.formats.catalog import E4M3
from megatron.quantscope.formats.codes import encode_table
from megatron.quantscope.formats.job import Job
from megatron.quantscope.formats.records import Format
from megatron.quantscope.formats.scales import tensor_amax
from megatron.quantscope.formats.triton_rounding import Element, element_of
from megatron.quantscope.formats.triton_scales import Scale, scale_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What the kernels take; others are left to `torch_backend`."""

INTERPRETED: bool = triton.knobs.runtime.interpret
TILE = 1 << 16 if INTERPRETED else 1 << 11
"""Elements. The interpreter takes a millisecond a tile, whatever its size."""

_AMAX_PROGRAMS = 1 << 11
_MANY_WARPS = {"num_warps": 4, "enable_fp_fusion": False}
_ONE_WARP = {"num_warps": 1, "enable_fp_fusion": False}


@cache
def can_run(fmt: Format) -> bool:
    """Whether the kernels have what the record asks for; all of `FORMATS` they have."""
    try:
        element_of(fmt, saturate=True, short_input=False)
    except NotImplementedError:
        return False
    block_fits = fmt.block is None or (fmt.block & (fmt.block - 1) == 0 and fmt.block**2 <= TILE)
    return block_fits and torch_backend.can_run(fmt)


def run(x: Tensor, out: Tensor, job: Job) -> None:
    """Quantise and dequantise dense x into `out`, which has its shape, dtype and strides, or is x."""
    with on_device(x.device):
        if job.fmt.block is None:
            _launch_flat(x, out, job)
        else:
            _launch_blocks(x, out, job)


def run_both(x: Tensor, along_row: Tensor, down_column: Tensor, job: Job) -> None:
    """Quantise a contiguous matrix with blocks along its last axis and with blocks along its first, from one read.

    The format has blocks; `job.axis` does not matter.
    """
    assert job.fmt.block is not None
    element, scale = _constants(job.fmt, job.scale_rule, job.saturate, x.dtype)
    rows, columns = x.shape
    block = job.fmt.block
    blocks = TILE // block**2
    grid = (triton.cdiv(rows, block) * triton.cdiv(columns, blocks * block),)
    with on_device(x.device):
        triton_kernels.both_kernel[grid](
            _memory(x),
            _memory(along_row),
            _memory(down_column),
            _tensor_amax(x, job, scale),
            rows,
            columns,
            ELEMENT=element,
            SCALE=scale,
            BLOCKS=blocks,
            **_ONE_WARP,
        )


def encode(x: Tensor, codes: Tensor, scales: Tensor | None, job: Job) -> None:
    """Write the element codes of dense x and, for a format with block scales, the codes of these.

    Args:
        x: Dense.
        codes: uint8, x's shape and strides; one code an element. Codes of a block with a NaN or Inf are 0.
        scales: uint8, x's shape with the axis replaced by its number of blocks, in the same order of memory: E8M0 (255
            is NaN) or, for nvfp4, E4M3 (0x7F is NaN). None for a format without block scales.
        job: What to do.
    """
    with on_device(x.device):
        table = _table(job.fmt, x.device)
        if job.fmt.block is None:
            _launch_flat(x, codes, job, table=table)
        else:
            _launch_blocks(x, codes, job, scales=scales, table=table)


def _launch_flat(x: Tensor, out: Tensor, job: Job, *, table: Tensor | None = None) -> None:
    element, scale = _constants(job.fmt, job.scale_rule, job.saturate, x.dtype)
    triton_kernels.flat_kernel[(triton.cdiv(x.numel(), TILE),)](
        _memory(x),
        _memory(out),
        _tensor_amax(x, job, scale),
        table,
        x.numel(),
        ELEMENT=element,
        SCALE=scale,
        TILE=TILE,
        **_MANY_WARPS,
    )


def _launch_blocks(
    x: Tensor, out: Tensor, job: Job, *, scales: Tensor | None = None, table: Tensor | None = None
) -> None:
    assert job.fmt.block is not None
    element, scale = _constants(job.fmt, job.scale_rule, job.saturate, x.dtype)
    outer, length, inner = slabs.around_axis(x, job.axis)
    blocks = triton.cdiv(length, job.fmt.block)
    arguments: dict[str, Any] = {
        "x_ptr": _memory(x),
        "out_ptr": _memory(out),
        "scales_ptr": scales,
        "amax_ptr": _tensor_amax(x, job, scale),
        "table_ptr": table,
        "scale_table_ptr": None if table is None or scale.element is None else _table(E4M3, x.device),
        "length": length,
        "ELEMENT": element,
        "SCALE": scale,
    }
    shape = TILE // job.fmt.block
    if inner == 1:
        triton_kernels.rows_kernel[(triton.cdiv(outer * blocks, shape),)](
            blocks=outer * blocks, BLOCKS=shape, RAGGED=length % job.fmt.block != 0, **arguments, **_MANY_WARPS
        )
    else:
        triton_kernels.columns_kernel[(outer * blocks * triton.cdiv(inner, shape),)](
            inner=inner, COLUMNS=shape, **arguments, **_ONE_WARP
        )


@cache
def _constants(fmt: Format, scale_rule: str, saturate: bool, dtype: torch.dtype) -> tuple[Element, Scale]:
    is_short = fmt.scale is None and dtype != torch.float32
    return element_of(fmt, saturate=saturate, short_input=is_short), scale_of(fmt, scale_rule)


@cache
def _table(fmt: Format, device: torch.device) -> Tensor:
    return encode_table(fmt).to(device)


def _memory(x: Tensor) -> Tensor:
    """What a kernel is given for x: bf16 as int16."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def _tensor_amax(x: Tensor, job: Job, scale: Scale) -> Tensor | None:
    """The largest magnitude as a float32 scalar on x's device, if the format asks for it; nobody waits for it."""
    if scale.tensor_max is None:
        return None
    if job.amax is not None:
        return tensor_amax(x, job.amax)
    bits = torch.zeros((), dtype=torch.int32, device=x.device)
    grid = (min(_AMAX_PROGRAMS, triton.cdiv(x.numel(), TILE)),)
    triton_kernels.amax_kernel[grid](_memory(x), bits, x.numel(), TILE=TILE, **_MANY_WARPS)
    return bits.view(torch.float32)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device; changing it costs more than asking which it is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
