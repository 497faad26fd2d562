"""Tensors as a format stores them: the codes of elements and their scales, and back.

    mx       codes uint8, scales uint8: E8M0, the exponent field of a power of two; 255 is NaN
    nvfp4    codes uint8, scales uint8: E4M3, and one float32 for the tensor that they are multiplied with
    fp8_*    codes uint8, scales float32, one for the tensor
    hifp8    codes uint8
    bf16/16  codes uint16: the bits of the number

A scale is what element values are multiplied with to be values again. FP4 is packed: two neighbours along the axis of
the blocks share a byte, the first of them in the low four bits; if their number is odd, the last four bits are 0.
FP6 has a byte an element. All codes of a block whose scale is NaN are 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.quantscope.formats import slabs
from megatron.quantscope.formats.backends import AUTO, backend_for
from megatron.quantscope.formats.catalog import E4M3, get_format
from megatron.quantscope.formats.codes import BYTE, NIBBLE, decode_table, has_codes
from megatron.quantscope.formats.job import FLOAT_DTYPES, Job, checked_axis, make_job
from megatron.quantscope.formats.operators import codes_as_operator, is_traced
from megatron.quantscope.formats.records import Format
from megatron.quantscope.formats.scales import E8M0_NAN, as_float32, e8m0_factors, tensor_amax, tensor_scale

_LOW = (1 << NIBBLE) - 1


class Quantized(NamedTuple):
    """A tensor as its format stores it: `dequantize(q.codes, fmt, scales=q.scales, tensor_scale=q.tensor_scale)`.

    Attributes:
        codes: uint8 in the tensor's shape (FP4: half as long along the axis), uint16 for bf16 and fp16.
        scales: Block scales, uint8: the shape with the axis replaced by the number of blocks; of fp8 a float32 scalar;
            None where there is no scale.
        tensor_scale: float32 scalar that the block scales of nvfp4 are multiplied with; else None.
    """

    codes: Tensor
    scales: Tensor | None
    tensor_scale: Tensor | None


def quantize(
    x: Tensor,
    fmt: str | Format,
    *,
    axis: int = -1,
    scale_rule: str = "floor",
    saturate: bool | None = None,
    amax: Tensor | None = None,
    backend: str = AUTO,
) -> Quantized:
    """Quantise x to codes and scales.

    `dequantize` of the result is `fake_quantize` of x in float32, bit for bit.

    Args:
        x: As of `fake_quantize`; a scalar counts as a vector of one element.
        fmt: As of `fake_quantize`, and so
        axis: this,
        scale_rule: this,
        saturate: this,
        amax: and this.
        backend: `auto`, `cpp`, `triton` or `torch`.

    Raises:
        TypeError: x is not of a floating-point dtype that is supported.
        ValueError: Any other argument is not allowed; the message says what is.
    """
    job = make_job(x, fmt, axis=axis, scale_rule=scale_rule, saturate=saturate, amax=amax)
    if is_traced(x):
        parts = codes_as_operator(x, job, backend)
        return Quantized(*parts, *[None] * (len(Quantized._fields) - len(parts)))
    module = backend_for(x, job, backend)
    x = x.detach()
    if not has_codes(job.fmt):
        return Quantized(_own_bits(x, job), None, None)
    if not hasattr(module, "encode"):
        raise ValueError(f"backend {backend!r} makes no codes: choose auto, cpp, triton or torch")
    x = (x.unsqueeze(0) if x.dim() == 0 else x) if slabs.is_dense(x) else x.contiguous()
    codes = torch.empty_like(x, dtype=torch.uint8)
    scales = None if job.fmt.block is None else slabs.empty_scales(x, job.axis, job.fmt.block)
    if x.numel():
        module.encode(x, codes, scales, job)
    if job.fmt.bits == NIBBLE:
        codes = _packed(codes, job.axis)
    return _with_tensor_scale(codes, scales, x, job)


def dequantize(
    codes: Tensor,
    fmt: str | Format,
    *,
    scales: Tensor | None = None,
    tensor_scale: Tensor | None = None,
    axis: int = -1,
    length: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The tensor that codes and scales stand for.

    Args:
        codes: As `Quantized` has them.
        fmt: The format.
        scales: As `Quantized` has them.
        tensor_scale: As `Quantized` has it.
        axis: The dimension along which blocks run.
        length: Elements along the axis, for packed codes of an odd number of them; None: two a byte.
        dtype: Of the result.

    Raises:
        TypeError: The codes or scales have a wrong dtype, or `dtype` is not supported.
        ValueError: Scales are missing, or their shape does not go with that of the codes.
    """
    if isinstance(fmt, str):
        fmt = get_format(fmt)
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"codes can not be made {dtype}: choose from {', '.join(map(str, FLOAT_DTYPES))}")
    wanted = torch.uint8 if has_codes(fmt) else torch.uint16
    if codes.dtype != wanted:
        raise TypeError(f"codes of {fmt.name} are {wanted}, not {codes.dtype}")
    if not has_codes(fmt):
        own: torch.dtype = getattr(torch, str(fmt.torch_dtype))
        return codes.view(own).to(dtype)
    if not codes.dim():
        raise ValueError("codes have no dimension: a single one is a tensor [1]")
    axis = checked_axis(codes.dim(), axis)
    codes = _unpacked(codes, axis, length) if fmt.bits == NIBBLE else _checked(codes, fmt, axis, length)
    values = decode_table(fmt).to(codes.device)[codes.int()]
    factor = _factor(fmt, scales, tensor_scale)
    if factor is None:
        return values.to(dtype)
    if fmt.block is not None:
        factor = _spread(factor, codes.shape, axis, fmt)
    return values.mul_(factor).to(dtype)


def _own_bits(x: Tensor, job: Job) -> Tensor:
    dtype: torch.dtype = getattr(torch, str(job.fmt.torch_dtype))
    own = as_float32(x if x.dim() else x.unsqueeze(0)).to(dtype)
    if job.saturate:
        own = own.clamp(-job.fmt.max, job.fmt.max)
    return own.view(torch.uint16)


def _with_tensor_scale(codes: Tensor, scales: Tensor | None, x: Tensor, job: Job) -> Quantized:
    if not job.fmt.has_tensor_scale:
        return Quantized(codes, scales, None)
    amax = tensor_amax(x, job.amax) if x.numel() else torch.zeros((), dtype=torch.float32, device=x.device)
    factor = 1.0 / tensor_scale(amax, job.fmt.max * (1.0 if job.fmt.block is None else E4M3.max))
    return Quantized(codes, factor, None) if job.fmt.block is None else Quantized(codes, scales, factor)


def _packed(codes: Tensor, axis: int) -> Tensor:
    pairs = codes.movedim(axis, -1)
    if pairs.shape[-1] % 2:
        pairs = torch.nn.functional.pad(pairs, (0, 1))
    return (pairs[..., 0::2] | pairs[..., 1::2] << NIBBLE).movedim(-1, axis)


def _unpacked(packed: Tensor, axis: int, length: int | None) -> Tensor:
    pairs = packed.movedim(axis, -1)
    most = 2 * pairs.shape[-1]
    if length is not None and length not in (most, most - 1):
        raise ValueError(f"length {length} does not go with {pairs.shape[-1]} bytes: give {most - 1} or {most}")
    codes = torch.stack((pairs & _LOW, pairs >> NIBBLE), dim=-1).flatten(-2)
    return codes[..., :length].movedim(-1, axis)


def _checked(codes: Tensor, fmt: Format, axis: int, length: int | None) -> Tensor:
    if length not in (None, codes.shape[axis]):
        raise ValueError(f"length {length} does not go with {codes.shape[axis]} codes along axis {axis}")
    if fmt.bits < BYTE and (codes >> fmt.bits).any():
        raise ValueError(f"codes of {fmt.name} have {fmt.bits} bits, not as many as {int(codes.max())}")
    return codes


def _factor(fmt: Format, scales: Tensor | None, tensor_scale: Tensor | None) -> Tensor | None:
    """float32: what element values are multiplied with, one a block or one."""
    if fmt.scale is None:
        return None
    if scales is None or (fmt.scale == "e4m3+fp32" and tensor_scale is None):
        raise ValueError(f"codes of {fmt.name} need scales{' and tensor_scale' if fmt.scale == 'e4m3+fp32' else ''}")
    wanted = torch.float32 if fmt.block is None else torch.uint8
    if scales.dtype != wanted:
        raise TypeError(f"scales of {fmt.name} are {wanted}, not {scales.dtype}")
    for scale in (scales if fmt.block is None else None, tensor_scale):
        if scale is not None and (scale.dtype != torch.float32 or scale.dim()):
            raise ValueError(f"the scale of a tensor is a float32 scalar, not {scale.dtype} {list(scale.shape)}")
    if fmt.scale == "e8m0":
        field = scales.int()
        return e8m0_factors(field)[1].masked_fill_(field == E8M0_NAN, float("nan"))
    if tensor_scale is not None:
        return decode_table(E4M3).to(scales.device)[scales.int()] * tensor_scale
    return scales


def _spread(factor: Tensor, shape: torch.Size, axis: int, fmt: Format) -> Tensor:
    """A factor an element."""
    assert fmt.block is not None
    expected = list(shape)
    expected[axis] = -(-shape[axis] // fmt.block)
    if list(factor.shape) != expected:
        raise ValueError(f"scales of shape {list(factor.shape)} do not go with codes of {list(shape)}: {expected} do")
    return factor.repeat_interleave(fmt.block, dim=axis).narrow(axis, 0, shape[axis])
