"""Fake quantisation with eager torch, on any device: the recipe that runs where no compiled kernel is.

Every format goes the same way. A slab of the tensor is widened to float32 and parted from its signs; a *step* turns the
magnitudes into quantised ones; the signs come back and the slab is narrowed to the tensor's dtype. The steps differ in
the scale only, and there is one for each kind of scale.

Widening is exact, and so is narrowing for MX formats and HiFloat8, so the rounding to the element is the only one. A
float64 input is narrowed by rounding to odd, which keeps every later rounding right (float32 has more than two bits to
spare over any element): truncate, and set the last bit if anything was lost. Magnitudes of 2^128 and more count as the
largest float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.quantscope.formats import slabs
from megatron.quantscope.formats.catalog import E4M3
from megatron.quantscope.formats.job import Job
from megatron.quantscope.formats.records import Format
from megatron.quantscope.formats.rounding import round_magnitude_
from megatron.quantscope.formats.scales import FLOAT32_MAX, divide_by, e8m0_scale, tensor_scale

Step = Callable[[Tensor, Tensor], None]
"""(magnitudes, scratch), float32 [outer, blocks, block, inner]: quantises the magnitudes in place."""


def run(x: Tensor, out: Tensor, job: Job) -> None:
    """Quantise and dequantise dense x into `out`, which has its shape, dtype and strides, or is x."""
    step = _STEPS[job.fmt.scale](x, job)
    for x_view, out_view in zip(_views(x, job), _views(out, job), strict=True):
        _map_magnitudes(x_view, out_view, step, job.fmt)


def _views(x: Tensor, job: Job) -> list[Tensor]:
    return [slabs.flat_view(x)] if job.fmt.block is None else slabs.blocked_views(x, job.axis, job.fmt.block)


def _map_magnitudes(x: Tensor, out: Tensor, step: Step, fmt: Format) -> None:
    """Run `step` over a view [outer, blocks, block, inner], slab by slab."""
    buffers: list[Tensor] = []
    for index in slabs.slabs(x, slabs.slab_elements(x.device)):
        part = x[index]
        if not buffers:  # the first slab is the largest
            buffers = [torch.empty(part.numel(), dtype=torch.float32, device=x.device) for _ in range(3)]
        signed, magnitude, scratch = (buffer[: part.numel()].view(part.shape) for buffer in buffers)
        signed.copy_(part if part.dtype != torch.float64 else rounded_to_odd(part))
        torch.abs(signed, out=magnitude)
        step(magnitude, scratch)
        torch.copysign(magnitude, signed, out=magnitude)
        if not fmt.has_negative_zero:
            magnitude.add_(0.0)  # -0 + 0 is +0
        out[index].copy_(magnitude)


def rounded_to_odd(x: Tensor) -> Tensor:
    """A float64 tensor as float32: truncated, the last bit set where that lost anything; NaN and Inf stay."""
    nearest = x.float()
    too_far = nearest.double().abs() > x.abs()
    truncated = torch.where(too_far, nearest.nextafter(torch.zeros_like(nearest)), nearest)
    inexact = (truncated.double() != x) & torch.isfinite(x)
    return (truncated.view(torch.int32) | inexact.int()).view(torch.float32)


def _element_step(x: Tensor, job: Job) -> Step:
    """No scale: the element alone, by torch's own conversion where the element is a torch dtype."""
    if job.fmt.torch_dtype is None:
        return lambda a, scratch: round_magnitude_(a, scratch, job.fmt, saturate=job.saturate)
    dtype: torch.dtype = getattr(torch, job.fmt.torch_dtype)
    largest = job.fmt.max if job.saturate else math.inf

    def step(a: Tensor, scratch: Tensor) -> None:
        a.copy_(a.to(dtype)).clamp_(max=largest)

    return step


def _mx_step(x: Tensor, job: Job) -> Step:
    """One power of two a block (OCP MX 6.3). Quotient and product are exact."""

    def step(a: Tensor, scratch: Tensor) -> None:
        inverse, scale = e8m0_scale(_block_amax(a), job.fmt, job.scale_rule)
        a.mul_(inverse)
        round_magnitude_(a, scratch, job.fmt, saturate=job.saturate)
        a.mul_(scale)

    return step


def _per_tensor_step(x: Tensor, job: Job) -> Step:
    """One float32 a tensor (TransformerEngine's current scaling): x * scale, rounded, * (1 / scale)."""
    scale = tensor_scale(_tensor_amax(x, job), job.fmt.max)
    inverse = 1.0 / scale

    def step(a: Tensor, scratch: Tensor) -> None:
        a.mul_(scale)
        round_magnitude_(a, scratch, job.fmt, saturate=job.saturate)
        a.mul_(inverse)

    return step


def _nvfp4_step(x: Tensor, job: Job) -> Step:
    """One E4M3 a block and one float32 a tensor, float32 operations in the order of TransformerEngine's kernels.

    A block with a NaN or Inf becomes NaN, as in the MX formats (TransformerEngine leaves it open).
    """
    encode = tensor_scale(_tensor_amax(x, job), E4M3.max * job.fmt.max)
    decode = 1.0 / encode

    def step(a: Tensor, scratch: Tensor) -> None:
        amax = _block_amax(a)
        block_scale = divide_by(amax, job.fmt.max) * encode
        round_magnitude_(block_scale, torch.empty_like(block_scale), E4M3, saturate=True)
        block_decode = block_scale * decode
        a.mul_((1.0 / block_decode).clamp_(max=FLOAT32_MAX))
        round_magnitude_(a, scratch, job.fmt, saturate=job.saturate)
        a.mul_(block_decode.masked_fill_(~torch.isfinite(amax), math.nan))

    return step


def _block_amax(a: Tensor) -> Tensor:
    """The largest magnitude of each block, found among their bits: the same order, a quicker maximum, and NaN wins."""
    return a.view(torch.int32).amax(dim=slabs.BLOCK_DIM, keepdim=True).view(torch.float32)


def _tensor_amax(x: Tensor, job: Job) -> Tensor:
    """The largest magnitude, a float32 scalar; NaN if there is a NaN."""
    if job.amax is not None:
        return job.amax.to(device=x.device, dtype=torch.float32)
    smallest, largest = torch.aminmax(slabs.flat_view(x))
    amax = torch.maximum(-smallest, largest)
    return rounded_to_odd(amax) if amax.dtype == torch.float64 else amax.float()


_STEPS: dict[str | None, Callable[[Tensor, Job], Step]] = {
    None: _element_step,
    "e8m0": _mx_step,
    "fp32": _per_tensor_step,
    "e4m3+fp32": _nvfp4_step,
}
