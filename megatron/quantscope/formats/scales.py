"""The scales of scaled formats, from the largest magnitude (amax) of what they cover.

E8M0, one power of two S a block of 32, clamped to [2^-127, 2^127]; a block with a NaN or Inf has the scale NaN.
    floor  S = 2^(floor(log2 amax) - emax).  OCP MX 6.3. The largest elements of a block may lie between max and
           2^(emax+1); they saturate: with E4M3 whatever lies above 448/512 of the top of its binade.
    rceil  S = the smallest power of two >= float32(amax / max).  cuBLAS and TransformerEngine. Nothing saturates; a
           block whose amax has a large fraction gets the double scale, and its small elements lose a bit.
Both are read off the bits of amax, so they are exact where log2() in float32 is not (just below a power of two).

float32, one a tensor: max_element / amax. float32 and E4M3 (NVFP4): `torch_backend` shows the order of operations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.quantscope.formats.records import Format
from megatron.quantscope.formats.rounding import FRACTION_BITS, rounded_to_odd

FLOAT32_MAX = torch.finfo(torch.float32).max
E8M0_NAN = 255
_FRACTION_MASK = (1 << FRACTION_BITS) - 1
_TWO_TO_MINUS_127 = 1 << (FRACTION_BITS - 1)  # bits of a float32 subnormal
_TWO_TO_127 = 254 << FRACTION_BITS  # bits; 254 - field is the exponent field of the reciprocal


def e8m0_field(amax: Tensor, fmt: Format, rule: str) -> Tensor:
    """The stored byte of S, int32, of blocks whose largest magnitudes are `amax`, float32; NaN blocks as if finite."""
    return _E8M0_RULES[rule](amax.view(torch.int32), fmt)


def e8m0_factors(field: Tensor) -> tuple[Tensor, Tensor]:
    """(1/S, S), float32."""
    bits = field << FRACTION_BITS
    inverse = (_TWO_TO_127 - bits).view(torch.float32)
    return inverse, bits.masked_fill_(field == 0, _TWO_TO_MINUS_127).view(torch.float32)


def largest_magnitude(x: Tensor) -> Tensor:
    """The largest magnitude of a tensor that is not empty: a float32 scalar, NaN if there is a NaN."""
    smallest, largest = torch.aminmax(x)
    return as_float32(torch.maximum(-smallest, largest))


def as_float32(x: Tensor) -> Tensor:
    """The float32 that stands for a number in all arithmetic of scales."""
    return rounded_to_odd(x) if x.dtype == torch.float64 else x.float()


def tensor_amax(x: Tensor, given: Tensor | None) -> Tensor:
    """The largest magnitude of x, or the one that is `given`, on x's device."""
    return largest_magnitude(x) if given is None else as_float32(given).to(x.device)


def tensor_scale(amax: Tensor, largest: float) -> Tensor:
    """float32(largest / amax), at most the largest float32; 1 where amax is 0, Inf or NaN."""
    scale = (torch.full_like(amax, largest) / amax).clamp_(max=FLOAT32_MAX)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, torch.ones_like(scale))


def divide_by(x: Tensor, divisor: float) -> Tensor:
    """The quotient rounded once; by a plain number, torch multiplies with its rounded reciprocal on some devices."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def _floor_field(amax_bits: Tensor, fmt: Format) -> Tensor:
    return (amax_bits >> FRACTION_BITS).sub_(fmt.emax).clamp_(min=0)


def _rceil_field(amax_bits: Tensor, fmt: Format) -> Tensor:
    ratio_bits = divide_by(amax_bits.view(torch.float32), fmt.max).view(torch.int32)
    # Adding all fraction bits carries into the exponent unless the fraction is 0: the ceiling of log2.
    field = (ratio_bits + _FRACTION_MASK) >> FRACTION_BITS
    return field.masked_fill_(ratio_bits <= _TWO_TO_MINUS_127, 0)


_E8M0_RULES: dict[str, Callable[[Tensor, Format], Tensor]] = {"floor": _floor_field, "rceil": _rceil_field}
SCALE_RULES = tuple(_E8M0_RULES)
