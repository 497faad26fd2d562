"""Fake quantisation, slow and plain: every format as the list of its values, every rounding a search in that list.

This is what the fast backends are held against, so it shares nothing with them but the records. Read it with the
format's table beside it: `element_grid` writes the values down, `round_to_grid` picks the nearer neighbour, and each
kind of scale is a few lines of float64 (exact for powers of two) or, where a rule is defined by float32 operations,
of those operations one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from megatron.quantscope.formats.catalog import E4M3
from megatron.quantscope.formats.job import Job
from megatron.quantscope.formats.records import Format, exponent_of

E8M0_MIN, E8M0_MAX = -127, 127
FLOAT32_EMIN, FLOAT32_FRACTION_BITS = -126, 23
FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127


@cache
def element_grid(fmt: Format) -> list[float]:
    """All non-negative finite values of the element, ascending; without tapering, the index is the code."""
    values = [0.0]
    if not fmt.is_tapered:
        values += [i * fmt.min_subnormal for i in range(1, 2**fmt.mantissa_bits)]
    lowest = exponent_of(fmt.min_subnormal) if fmt.is_tapered else fmt.emin
    for exponent in range(lowest, fmt.emax + 1):
        steps = 2 ** fmt.mantissa_bits_at(exponent)
        values += [math.ldexp(1.0 + i / steps, exponent) for i in range(steps)]
    return [value for value in values if value <= fmt.max]


def round_to_grid(x: Tensor, fmt: Format, *, saturate: bool) -> Tensor:
    """The nearest element value of each float64 of x, ties and overflow as the record says.

    To judge what lies beyond max, the grid goes on by one more value, as if the exponent had room: what rounds there
    has overflown.
    """
    grid = element_grid(fmt)
    spacing = math.ldexp(1.0, fmt.emax - fmt.mantissa_bits_at(fmt.emax))
    values = torch.tensor([*grid, fmt.max + spacing], dtype=torch.float64, device="cpu")
    magnitude = x.abs()
    above = torch.searchsorted(values, magnitude.nan_to_num().clamp(max=values[-1])).clamp(min=1)
    below = above - 1
    to_below, to_above = magnitude - values[below], values[above] - magnitude
    tie_goes_up = (above % 2 == 0) if fmt.rounding == "half_even" else torch.ones_like(above, dtype=torch.bool)
    goes_up = (to_above < to_below) | ((to_above == to_below) & tie_goes_up)
    index = torch.where(goes_up, above, below)
    rounded = values[index]
    rounded[index == len(grid)] = fmt.max if saturate else math.inf if fmt.has_inf else math.nan
    rounded[torch.isnan(x)] = math.nan
    signed = torch.copysign(rounded, x)
    return signed if fmt.has_negative_zero else signed + 0.0


def run(x: Tensor, out: Tensor, job: Job) -> None:
    """Quantise and dequantise x into `out`. Results are float32 numbers, so what comes to 2^128 is Inf."""
    wide = x.to("cpu", torch.float64)
    in_range = torch.where(torch.isinf(wide), wide, wide.clamp(-FLOAT32_MAX, FLOAT32_MAX))
    rows = in_range.movedim(job.axis, -1).contiguous()
    out.copy_(_BY_SCALE[job.fmt.scale](rows, job).float().movedim(-1, job.axis))


def _elements(rows: Tensor, job: Job) -> Tensor:
    return round_to_grid(rows, job.fmt, saturate=job.saturate)


def _by_block(rows: Tensor, job: Job, quantise: Callable[[Tensor], Tensor]) -> Tensor:
    """`quantise` for each block of a row, one after the other."""
    assert job.fmt.block is not None
    blocks_by_row = (torch.split(row, job.fmt.block) for row in rows.reshape(-1, rows.shape[-1]))
    result = [torch.cat([quantise(block) for block in blocks]) for blocks in blocks_by_row]
    return torch.stack(result).view(rows.shape)


def _mx(rows: Tensor, job: Job) -> Tensor:
    """OCP MX 6.3: one power of two a block."""

    def quantise(block: Tensor) -> Tensor:
        amax = block.abs().max().item()
        if not math.isfinite(amax):
            return torch.full_like(block, math.nan)
        scale = math.ldexp(1.0, min(max(_E8M0_EXPONENT[job.scale_rule](amax, job.fmt), E8M0_MIN), E8M0_MAX))
        return round_to_grid(block / scale, job.fmt, saturate=job.saturate) * scale

    return _by_block(rows, job, quantise)


def _floor_exponent(amax: float, fmt: Format) -> int:
    return exponent_of(amax) - fmt.emax if amax else E8M0_MIN


def _rceil_exponent(amax: float, fmt: Format) -> int:
    ratio = float(np.float32(amax) / np.float32(fmt.max))
    if ratio == 0.0:
        return E8M0_MIN
    exponent = exponent_of(ratio)
    return exponent if ratio == math.ldexp(1.0, exponent) else exponent + 1


def _per_tensor(rows: Tensor, job: Job) -> Tensor:
    """One float32 a tensor; every product is a float32 product."""
    scale = _tensor_scale(rows, job, job.fmt.max)
    rounded = round_to_grid(_product(rows, scale), job.fmt, saturate=job.saturate)
    return _product(rounded, np.float32(1.0) / scale)


def _nvfp4(rows: Tensor, job: Job) -> Tensor:
    """One E4M3 a block and one float32 a tensor; every operation is one of float32."""
    encode = _tensor_scale(rows, job, E4M3.max * job.fmt.max)
    decode = np.float32(1.0) / encode

    def quantise(block: Tensor) -> Tensor:
        amax = np.float32(_to_odd(block.abs().max()).item())
        if not np.isfinite(amax):
            return torch.full_like(block, math.nan)
        with np.errstate(over="ignore"):
            wanted = torch.tensor([float(amax / np.float32(job.fmt.max) * encode)], dtype=torch.float64, device="cpu")
        block_decode = np.float32(round_to_grid(wanted, E4M3, saturate=True).item()) * decode
        with np.errstate(divide="ignore", over="ignore"):
            block_encode = min(np.float32(1.0) / block_decode, np.float32(FLOAT32_MAX))
        rounded = round_to_grid(_product(block, block_encode), job.fmt, saturate=job.saturate)
        return _product(rounded, block_decode)

    return _by_block(rows, job, quantise)


def _product(a: Tensor, factor: np.float32) -> Tensor:
    """The float32 product of a and a factor, as float64."""
    return (_to_odd(a).float() * float(factor)).double()


def _to_odd(a: Tensor) -> Tensor:
    """Values that are no float32 on the way to be one: cut off, to a last digit that is odd. Others stay."""
    exponent = torch.frexp(a).exponent - 1
    step = torch.ldexp(torch.ones_like(a), exponent.clamp(min=FLOAT32_EMIN) - FLOAT32_FRACTION_BITS)
    steps = torch.trunc(a.abs() / step)
    odd = steps + (steps % 2 == 0)
    magnitude = torch.where(steps * step == a.abs(), steps, odd) * step
    return torch.where(torch.isfinite(a), torch.copysign(magnitude, a), a)


def _tensor_scale(rows: Tensor, job: Job, largest: float) -> np.float32:
    amax = np.float32(_to_odd((rows.abs().max() if job.amax is None else job.amax).double()).item())
    if amax == 0 or not np.isfinite(amax):
        return np.float32(1.0)
    with np.errstate(over="ignore"):
        return min(np.float32(largest) / amax, np.float32(FLOAT32_MAX))


_E8M0_EXPONENT: dict[str, Callable[[float, Format], int]] = {"floor": _floor_exponent, "rceil": _rceil_exponent}
_BY_SCALE: dict[str | None, Callable[[Tensor, Job], Tensor]] = {
    None: _elements,
    "e8m0": _mx,
    "fp32": _per_tensor,
    "e4m3+fp32": _nvfp4,
}
