"""The one door to fake quantisation: what was asked is checked here, and a backend is chosen.

A backend is a function (x, out, job) -> None; `torch` is the recipe that runs, `reference` the slow and plain one that
it is held against, and `auto` the one that callers get. None of them knows which one ran, so a faster backend is one
more row of the table.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.quantscope.formats import reference, slabs, torch_backend
from megatron.quantscope.formats.catalog import get_format
from megatron.quantscope.formats.job import Job
from megatron.quantscope.formats.records import Format
from megatron.quantscope.formats.scales import SCALE_RULES

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_BACKENDS: dict[str, Callable[[Tensor, Tensor, Job], None]] = {
    "auto": torch_backend.run,
    "torch": torch_backend.run,
    "reference": reference.run,
}


def fake_quantize(
    x: Tensor,
    fmt: str | Format,
    *,
    axis: int = -1,
    out: Tensor | None = None,
    scale_rule: str = "floor",
    saturate: bool | None = None,
    amax: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Quantise x to a number format and back: what is left of x once it has been through that format.

    The result is in x's dtype, which rounds once more where it can not hold the value (never for MX formats and
    HiFloat8 of a bf16 or wider x). It is no part of autograd's graph: gradients are the business of
    `megatron.quantscope.gemm`.

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
        backend: `auto`, `torch` or `reference`.

    Returns:
        `out`, or a new tensor laid out as x.

    Raises:
        TypeError: x is not of a floating-point dtype that is supported.
        ValueError: Any other argument is not allowed; the message says what is.
    """
    if isinstance(fmt, str):
        fmt = get_format(fmt)
    job = Job(
        fmt=fmt,
        axis=_checked_axis(x, axis),
        scale_rule=_one_of("scale rule", scale_rule, SCALE_RULES),
        saturate=_resolved_saturate(fmt, saturate),
        amax=amax,
    )
    run = _BACKENDS[_one_of("backend", backend, tuple(_BACKENDS))]
    _check_dtype(x)
    _check_out(x, out)
    if out is None:
        out = torch.empty_like(x)
    if x.numel() > 0:
        with torch.no_grad():
            _run_dense(run, x.detach(), out.detach(), job)
    return out


def _run_dense(run: Callable[[Tensor, Tensor, Job], None], x: Tensor, out: Tensor, job: Job) -> None:
    """Give the backend tensors without gaps and of equal strides, at the price of copies where they are not."""
    if x.dim() == 0:
        x, out = x.unsqueeze(0), out.unsqueeze(0)
    if not slabs.is_dense(x):
        x = x.contiguous()
    if out.stride() == x.stride():
        run(x, out, job)
        return
    result = torch.empty_like(x)
    run(x, result, job)
    out.copy_(result)


def _checked_axis(x: Tensor, axis: int) -> int:
    dims = max(1, x.dim())
    if not -dims <= axis < dims:
        raise ValueError(f"axis {axis} is not allowed for {x.dim()} dimensions: choose {-dims} to {dims - 1}")
    return axis % dims


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"unknown {what} {value!r}: choose from {', '.join(allowed)}")
    return value


def _resolved_saturate(fmt: Format, saturate: bool | None) -> bool:
    if saturate is None:
        return fmt.overflow == "saturate"
    if not saturate and not (fmt.has_inf or fmt.has_nan):
        raise ValueError(f"saturate=False is not allowed for {fmt.name}: its element has neither Inf nor NaN")
    return saturate


def _check_dtype(x: Tensor) -> None:
    if x.dtype not in FLOAT_DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)
        raise TypeError(f"a tensor of {x.dtype} can not be quantised: it must be one of {allowed}")


def _check_out(x: Tensor, out: Tensor | None) -> None:
    if out is not None and (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} on {out.device}; it must be as x: "
            f"{x.dtype} {list(x.shape)} on {x.device}"
        )
