"""Fake quantisation with eager torch, on any device: the recipe that runs where no compiled kernel is.

Every format goes the same way. A slab of the tensor is widened to float32 and parted from its signs; a *step* turns the
magnitudes into element values and tells their scale; then either the scale is multiplied back, the signs return and the
slab is narrowed to the tensor's dtype, or codes are looked up. The steps differ in the scale only, and there is one for
each kind of scale.

Widening is exact, and so is narrowing for MX formats and HiFloat8, so the rounding to the element is the only one. A
float64 input is narrowed by rounding to odd, which keeps every later rounding right (float32 has more than two bits to
spare over any element): truncate, and set the last bit if anything was lost. Magnitudes of 2^128 and more count as the
largest float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.quantscope.formats import slabs
from megatron.quantscope.formats.catalog import E4M3
from megatron.quantscope.formats.codes import encode_table, nan_code
from megatron.quantscope.formats.job import Job
from megatron.quantscope.formats.records import Format
from megatron.quantscope.formats.rounding import EXPONENT_BIAS, FRACTION_BITS, round_magnitude_, rounded_to_odd
from megatron.quantscope.formats.scales import (
    E8M0_NAN,
    FLOAT32_MAX,
    divide_by,
    e8m0_factors,
    e8m0_field,
    tensor_amax,
    tensor_scale,
)

_FLOAT32_BITS, _BF16_BITS = 32, 16


@dataclass(frozen=True)
class Scale:
    """What element values are multiplied with to be values of the tensor.

    Attributes:
        factor: float32, one a block or one; None: nothing.
        stored: One byte a block, int32 [outer, blocks, 1, inner]; None: no block scales.
        bad: Blocks that are NaN as a whole, bool, like `stored`.
    """

    factor: Tensor | None = None
    stored: Tensor | None = None
    bad: Tensor | None = None


Step = Callable[[Tensor, Tensor], Scale]
"""(magnitudes, scratch), float32 [outer, blocks, block, inner]: makes the magnitudes element values, in place."""


def can_run(fmt: Format) -> bool:
    """Whether `rounding` has what the record asks for; for all of `FORMATS` it has."""
    if fmt.torch_dtype is not None:
        return True
    constant_fits = fmt.emax + 1 + FRACTION_BITS - fmt.mantissa_bits <= EXPONENT_BIAS
    if fmt.mantissa_bits >= FRACTION_BITS:
        return False
    return fmt.is_tapered == (fmt.rounding == "half_away") and (fmt.is_tapered or constant_fits)


def run(x: Tensor, out: Tensor, job: Job) -> None:
    """Quantise and dequantise dense x into `out`, which has its shape, dtype and strides, or is x."""
    step = step_for(x, job)
    for x_view, out_view in zip(_views(x, job), _views(out, job), strict=True):
        for index, magnitude, signed, scale in elements(x_view, step):
            if scale.factor is not None:
                magnitude.mul_(scale.factor)
            if scale.bad is not None:
                magnitude.masked_fill_(scale.bad, math.nan)
            out_view[index].copy_(_with_signs(magnitude, signed, job))


def encode(x: Tensor, codes: Tensor, scales: Tensor | None, job: Job) -> None:
    """Write the codes of dense x's elements, uint8 of its shape and strides, and the bytes of its block scales.

    `scales` has x's shape but for the axis, where it has one byte a block, in the same order of dimensions.
    """
    step = step_for(x, job)
    table = encode_table(job.fmt).to(x.device)
    stored_views: list[Tensor | None] = [None]
    if scales is not None and job.fmt.block is not None:
        stored_views = [*slabs.scale_views(scales, x, job.axis, job.fmt.block)]
    for x_view, codes_view, stored_view in zip(_views(x, job), _views(codes, job), stored_views, strict=True):
        for index, magnitude, signed, scale in elements(x_view, step):
            found = table[_bf16_bits(_with_signs(magnitude, signed, job))]
            if stored_view is not None and scale.stored is not None and scale.bad is not None:
                found.masked_fill_(scale.bad, 0)
                nan = E8M0_NAN if job.fmt.scale == "e8m0" else nan_code(E4M3)
                stored_view[index].copy_(scale.stored.masked_fill(scale.bad, nan))
            codes_view[index].copy_(found)


def step_for(x: Tensor, job: Job) -> Step:
    """What is done to the slabs of x."""
    return _STEPS[job.fmt.scale](x, job)


def _views(x: Tensor, job: Job) -> list[Tensor]:
    return [slabs.flat_view(x)] if job.fmt.block is None else slabs.blocked_views(x, job.axis, job.fmt.block)


def elements(x: Tensor, step: Step) -> Iterator[tuple[tuple[slice, ...], Tensor, Tensor, Scale]]:
    """(index, element values without sign, x as float32, scale) of each slab of a view [outer, blocks, block, inner].

    The tensors are good until the next slab is asked for.
    """
    buffers: list[Tensor] = []
    for index in slabs.slabs(x, slabs.slab_elements(x.device)):
        part = x[index]
        if not buffers:  # the first slab is the largest
            buffers = [torch.empty(part.numel(), dtype=torch.float32, device=x.device) for _ in range(3)]
        signed, magnitude, scratch = (buffer[: part.numel()].view(part.shape) for buffer in buffers)
        signed.copy_(part if part.dtype != torch.float64 else rounded_to_odd(part))
        torch.abs(signed, out=magnitude)
        yield index, magnitude, signed, step(magnitude, scratch)


def _bf16_bits(x: Tensor) -> Tensor:
    """The bf16 patterns of float32 numbers that are bf16; a cast would lose the sign of NaN."""
    return (x.view(torch.int32) >> (_FLOAT32_BITS - _BF16_BITS)) & ((1 << _BF16_BITS) - 1)


def _with_signs(magnitude: Tensor, signed: Tensor, job: Job) -> Tensor:
    torch.copysign(magnitude, signed, out=magnitude)
    return magnitude if job.fmt.has_negative_zero else magnitude.add_(0.0)  # -0 + 0 is +0


def _element_step(x: Tensor, job: Job) -> Step:
    """No scale: the element alone, by torch's own conversion where the element is a torch dtype."""
    dtype = None if job.fmt.torch_dtype is None else getattr(torch, job.fmt.torch_dtype)
    largest = job.fmt.max if job.saturate else math.inf

    def step(a: Tensor, scratch: Tensor) -> Scale:
        if dtype is None:
            round_magnitude_(a, scratch, job.fmt, saturate=job.saturate)
        else:
            a.copy_(a.to(dtype)).clamp_(max=largest)
        return Scale()

    return step


def _mx_step(x: Tensor, job: Job) -> Step:
    """One power of two a block (OCP MX 6.3). Quotient and product are exact."""

    def step(a: Tensor, scratch: Tensor) -> Scale:
        amax = _block_amax(a)
        field = e8m0_field(amax, job.fmt, job.scale_rule)
        inverse, factor = e8m0_factors(field)
        a.mul_(inverse)
        round_magnitude_(a, scratch, job.fmt, saturate=job.saturate)
        return Scale(factor, field, ~torch.isfinite(amax))

    return step


def _per_tensor_step(x: Tensor, job: Job) -> Step:
    """One float32 a tensor (TransformerEngine's current scaling): x * scale, rounded, * (1 / scale)."""
    scale = tensor_scale(tensor_amax(x, job.amax), job.fmt.max)
    inverse = 1.0 / scale

    def step(a: Tensor, scratch: Tensor) -> Scale:
        a.mul_(scale)
        round_magnitude_(a, scratch, job.fmt, saturate=job.saturate)
        return Scale(inverse)

    return step


def _nvfp4_step(x: Tensor, job: Job) -> Step:
    """One E4M3 a block and one float32 a tensor, float32 operations in the order of TransformerEngine's kernels.

    A block with a NaN or Inf becomes NaN, as in the MX formats (TransformerEngine leaves it open).
    """
    encode = tensor_scale(tensor_amax(x, job.amax), E4M3.max * job.fmt.max)
    decode = 1.0 / encode
    table = encode_table(E4M3).to(x.device)

    def step(a: Tensor, scratch: Tensor) -> Scale:
        amax = _block_amax(a)
        block_scale = divide_by(amax, job.fmt.max) * encode
        round_magnitude_(block_scale, torch.empty_like(block_scale), E4M3, saturate=True)
        block_decode = block_scale * decode
        a.mul_((1.0 / block_decode).clamp_(max=FLOAT32_MAX))
        round_magnitude_(a, scratch, job.fmt, saturate=job.saturate)
        stored = table[_bf16_bits(block_scale)]
        return Scale(block_decode, stored, ~torch.isfinite(amax))

    return step


def _block_amax(a: Tensor) -> Tensor:
    """The largest magnitude of each block, found among their bits: the same order, a quicker maximum, and NaN wins."""
    return a.view(torch.int32).amax(dim=slabs.BLOCK_DIM, keepdim=True).view(torch.float32)


_STEPS: dict[str | None, Callable[[Tensor, Job], Step]] = {
    None: _element_step,
    "e8m0": _mx_step,
    "fp32": _per_tensor_step,
    "e4m3+fp32": _nvfp4_step,
}
