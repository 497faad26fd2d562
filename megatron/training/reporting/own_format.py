"""What the run's own quantisation does to an operand: the high-precision tensor against what its GEMM is given.

Recipes, scale rules and gradient scales count. Of the GEMMs that an operand goes into, the first that has it quantised
is looked at (where all do: fprop for x and w, dgrad for dy, scores for q and k, context for v, dp for do). A format
with a scale for the whole tensor is given the amax of this rank's shard.

On the CPU one read of the tensor does (`formats.measure_format`). On CUDA the very code that quantises in training runs
once more, and its result is compared; nothing waits for the device: figures stay there until they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.quantscope.analysis.roles import role_of
from megatron.quantscope.flags.values import NO_GRAD_SCALE, POW2_AMAX
from megatron.quantscope.formats import Format, get_format, measure_format
from megatron.quantscope.formats.scales import largest_magnitude
from megatron.quantscope.formats.statistics import sqnr_db
from megatron.quantscope.gemm.operands import (
    GRADIENT_OPERANDS,
    AttentionQuant,
    LinearQuant,
    OperandFormats,
    pow2_scale,
)

_KINDS: Mapping[str, type[OperandFormats]] = {"linear": LinearQuant, "attention": AttentionQuant}
CPU = "cpu"
_SLAB = 1 << 22  # elements: float64 temporaries of 32 MB


@dataclass(frozen=True)
class OperandDamage:
    """Sums over the elements of an operand, or of many: they add up.

    Attributes:
        signal_squares: Sum of x^2 of the finite elements.
        error_squares: Sum of (x - q(x))^2 over those that are finite before and after.
        underflow: Elements that are not zero and become zero.
        lost: Finite elements that become Inf or NaN.
    """

    signal_squares: float = 0.0
    error_squares: float = 0.0
    underflow: int = 0
    lost: int = 0

    @classmethod
    def of(cls, figures: Tensor) -> OperandDamage:
        """Read what `measure_operand` gave; waits for its device."""
        signal, error, underflow, lost = figures.tolist()
        return cls(signal, error, int(underflow), int(lost))

    def __add__(self, other: OperandDamage) -> OperandDamage:
        return OperandDamage(
            self.signal_squares + other.signal_squares,
            self.error_squares + other.error_squares,
            self.underflow + other.underflow,
            self.lost + other.lost,
        )

    @property
    def sqnr_db(self) -> float:
        """Signal to quantisation noise."""
        return sqnr_db(self.signal_squares, self.error_squares, self.lost)


def measure_operand(
    tensor: Tensor, layer_type: str, tensor_name: str, formats: Mapping[str, Any], *, head_dim: int | None = None
) -> Tensor | None:
    """The figures of an `OperandDamage`, float64 on the tensor's device.

    Args:
        tensor: As captured.
        layer_type: As captured; with
        tensor_name: this it says which GEMM the tensor goes into.
        formats: What each operand of the module's GEMMs is quantised to.
        head_dim: Features of a head, of attention.

    Returns:
        None where nothing is quantised: of results, of operands in high precision, and of formats that change nothing.
    """
    role = role_of(layer_type, tensor_name)
    found = role.first_quantised(formats)
    if found is None or layer_type not in _KINDS or get_format(found[1]).is_identity_for(tensor.dtype):
        return None
    use, fmt, quant = role.uses[found[0]], get_format(found[1]), _KINDS[layer_type].from_formats(formats)
    operand, axis = use.view(tensor.detach(), head_dim)
    if operand.device.type == CPU:
        scale = _scale_of(operand, role.symbol, quant, fmt)
        return _measure(operand, scale, fmt, axis, quant.scale_rule)
    return _compare(operand, quant.quantize(operand, use.gemm, role.symbol, axis=axis))


def _scale_of(x: Tensor, symbol: str, quant: OperandFormats, fmt: Format) -> float:
    """What training multiplies the operand by before it is quantised."""
    if symbol not in GRADIENT_OPERANDS or quant.grad_scale == NO_GRAD_SCALE or not x.numel():
        return 1.0
    if quant.grad_scale == POW2_AMAX:
        return float(pow2_scale(largest_magnitude(x), fmt.full_precision_max))
    return float(quant.grad_scale)


def _measure(x: Tensor, scale: float, fmt: Format, axis: int, scale_rule: str) -> Tensor:
    scaled = x if scale == 1.0 else (x.float() if x.dtype == torch.float16 else x) * scale
    found = measure_format(scaled, fmt, axis=axis, scale_rule=scale_rule)
    squares = (found.tensor.sum_squares / scale**2, found.error_squares / scale**2)
    return torch.tensor([*squares, found.underflow, found.lost], dtype=torch.float64)


def _compare(x: Tensor, y: Tensor) -> Tensor:
    figures = torch.zeros(4, dtype=torch.float64, device=x.device)
    slabs = (torch.split(x.reshape(-1), _SLAB), torch.split(y.reshape(-1), _SLAB))
    for before, after in zip(*slabs, strict=True):
        finite = torch.isfinite(before)
        both = finite & torch.isfinite(after)
        error = torch.where(both, before.double() - after.double(), 0.0)
        figures += torch.stack(
            [
                torch.where(finite, before, 0.0).double().square().sum(),
                error.square().sum(),
                (both & (after == 0) & (before != 0)).sum().double(),
                (finite & ~both).sum().double(),
            ]
        )
    return figures
