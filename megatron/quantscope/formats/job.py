"""What a backend is asked to do, and the checks that come before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.quantscope.formats.catalog import get_format
from megatron.quantscope.formats.records import Format
from megatron.quantscope.formats.scales import SCALE_RULES

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Job:
    """The arguments of `fake_quantize` and `quantize`, checked and with their defaults filled in.

    Attributes:
        fmt: The format.
        axis: Dimension along which blocks run, >= 0.
        scale_rule: `floor` or `rceil`, for E8M0 scales.
        saturate: Whether a magnitude beyond max becomes max.
        amax: Scalar tensor, the largest magnitude of the whole tensor, if x is a shard of it.
    """

    fmt: Format
    axis: int
    scale_rule: str
    saturate: bool
    amax: Tensor | None


def make_job(
    x: Tensor, fmt: str | Format, *, axis: int, scale_rule: str, saturate: bool | None, amax: Tensor | None
) -> Job:
    """The job for a tensor.

    Raises:
        TypeError: x is not of a floating-point dtype that is supported.
        ValueError: Any other argument is not allowed; the message says what is.
    """
    if isinstance(fmt, str):
        fmt = get_format(fmt)
    if scale_rule not in SCALE_RULES:
        raise ValueError(f"unknown scale rule {scale_rule!r}: choose from {', '.join(SCALE_RULES)}")
    if x.dtype not in FLOAT_DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)
        raise TypeError(f"a tensor of {x.dtype} can not be quantised: it must be one of {allowed}")
    if amax is not None and (not isinstance(amax, Tensor) or amax.numel() != 1 or not amax.is_floating_point()):
        raise ValueError(f"amax is {amax!r}; it must be a floating-point tensor of one element")
    amax = None if amax is None else amax.detach().reshape(())
    axis = checked_axis(x.dim(), axis)
    return Job(fmt=fmt, axis=axis, scale_rule=scale_rule, saturate=_resolved(fmt, saturate), amax=amax)


def checked_axis(dims: int, axis: int) -> int:
    """The axis as a number >= 0; a scalar counts as one dimension.

    Raises:
        ValueError: There is no such axis.
    """
    places = max(1, dims)
    if not -places <= axis < places:
        raise ValueError(f"axis {axis} is not allowed for {dims} dimensions: choose {-places} to {places - 1}")
    return axis % places


def _resolved(fmt: Format, saturate: bool | None) -> bool:
    if saturate is None:
        return fmt.overflow == "saturate"
    if not saturate and not (fmt.has_inf or fmt.has_nan):
        raise ValueError(f"saturate=False is not allowed for {fmt.name}: its element has neither Inf nor NaN")
    return saturate
