"""The one door to fake quantisation: what was asked is checked here, and a backend is chosen (`backends`).

Backends take tensors without gaps whose results lie in memory as they do; what is not so is copied here.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from megatron.quantscope.formats import slabs
from megatron.quantscope.formats.backends import AUTO, backend_for
from megatron.quantscope.formats.job import Job, make_job
from megatron.quantscope.formats.operators import as_operator, is_traced
from megatron.quantscope.formats.records import Format


def fake_quantize(
    x: Tensor,
    fmt: str | Format,
    *,
    axis: int = -1,
    out: Tensor | None = None,
    scale_rule: str = "floor",
    saturate: bool | None = None,
    amax: Tensor | None = None,
    backend: str = AUTO,
) -> Tensor:
    """Quantise x to a number format and back: what is left of x once it has been through that format.

    The result is in x's dtype, which rounds once more where it can not hold the value (never for MX formats and
    HiFloat8 of a bf16 or wider x). It is no part of autograd's graph: gradients are the business of
    `megatron.quantscope.gemm`. Under torch.compile and with fake tensors it is the operator
    `quantscope::fake_quantize`.

    Args:
        x: bf16, fp16, fp32 or fp64, of any shape (also empty) and any strides.
        fmt: Name of a format (`FORMATS`) or its record.
        axis: Dimension along which the blocks of a block-scaled format run, from index 0; the last block of a row may
            be shorter. Other formats take no notice of it.
        out: Where to put the result: x's shape, dtype and device; may be x itself.
        scale_rule: How an E8M0 scale follows from a block's amax, `floor` or `rceil` (`scales`).
        saturate: What becomes of magnitudes beyond the largest value: True: that value; False: Inf, or NaN if there
            is no Inf; None: what the format's specification says.
        amax: Scalar tensor: the largest magnitude of the whole tensor where x is only a shard of it. Only formats
            with a scale for the whole tensor take notice of it.
        backend: `auto`, or one of `backends.BACKENDS`: `cpp`, `triton`, `torch`, `reference`.

    Returns:
        `out`, or a new tensor laid out as x.

    Raises:
        TypeError: x is not of a floating-point dtype that is supported.
        ValueError: Any other argument is not allowed; the message says what is.
    """
    job = make_job(x, fmt, axis=axis, scale_rule=scale_rule, saturate=saturate, amax=amax)
    _check_out(x, out)
    if is_traced(x):
        result = as_operator(x, job, backend)
        return result if out is None else out.copy_(result)
    module = backend_for(x, job, backend)
    if out is None:
        out = torch.empty_like(x)
    if x.numel() > 0:
        with torch.no_grad():
            _run_dense(module, x.detach(), out.detach(), job)
        if not out.is_inference():
            torch.autograd.graph.increment_version(out)  # a kernel writes where autograd does not see it
    return out


def fake_quantize_both(
    x: Tensor,
    fmt: str | Format,
    *,
    scale_rule: str = "floor",
    saturate: bool | None = None,
    amax: Tensor | None = None,
    backend: str = AUTO,
) -> tuple[Tensor, Tensor]:
    """Quantise a matrix with blocks along its last axis and with blocks along its first, as two GEMMs want it.

    The same as `fake_quantize` with `axis=1` and with `axis=0`, but x is read once where the backend can do that.

    Args:
        x: [rows, columns], of any strides.
        fmt: As of `fake_quantize`, and so
        scale_rule: this,
        saturate: this,
        amax: this,
        backend: and this.

    Returns:
        (blocks along a row, blocks down a column), both [rows, columns]; the same tensor twice if the format has no
        blocks.

    Raises:
        TypeError, ValueError: As of `fake_quantize`; ValueError too if x is no matrix.
    """
    if x.dim() != 2:
        raise ValueError(f"x has the shape {list(x.shape)}; it must be a matrix [rows, columns]")
    job = make_job(x, fmt, axis=1, scale_rule=scale_rule, saturate=saturate, amax=amax)
    module = None if is_traced(x) or job.fmt.block is None else backend_for(x, job, backend)
    if module is not None and hasattr(module, "run_both") and x.is_contiguous() and x.numel() > 0:
        along_row, down_column = torch.empty_like(x), torch.empty_like(x)
        with torch.no_grad():
            module.run_both(x.detach(), along_row, down_column, job)
        return along_row, down_column
    once = partial(fake_quantize, scale_rule=scale_rule, saturate=saturate, amax=amax, backend=backend)
    along_row = once(x, fmt, axis=1)
    return along_row, along_row if job.fmt.block is None else once(x, fmt, axis=0)


def _run_dense(module: ModuleType, x: Tensor, out: Tensor, job: Job) -> None:
    """Give the backend tensors without gaps and of equal strides, at the price of copies where they are not."""
    if x.dim() == 0:
        x, out = x.unsqueeze(0), out.unsqueeze(0)
    if not slabs.is_dense(x):
        x = x.contiguous()
    if out.stride() == x.stride() and (out.data_ptr() == x.data_ptr() or _are_apart(x, out)):
        module.run(x, out, job)
        return
    result = torch.empty_like(x)
    module.run(x, result, job)
    out.copy_(result)


def _are_apart(x: Tensor, out: Tensor) -> bool:
    """Whether dense tensors of one size share no memory."""
    return abs(out.data_ptr() - x.data_ptr()) >= x.numel() * x.element_size()


def _check_out(x: Tensor, out: Tensor | None) -> None:
    if out is not None and (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} on {out.device}; it must be as x: "
            f"{x.dtype} {list(x.shape)} on {x.device}"
        )
