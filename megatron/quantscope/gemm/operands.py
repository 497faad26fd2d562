"""Which format each operand of each GEMM of a module has, and the quantising of one operand.

A linear layer y = x wT runs three GEMMs, attention six. Each quantises its two operands along its own contraction axis,
so the same tensor (w in fprop and in dgrad) goes through the format twice, differently cut into blocks:

    fprop   y  = x wT     along K         scores   s  = q kT    along head_dim
    dgrad   dx = dy w     along N         context  o  = p v     along keys
    wgrad   dw = dyT x    along tokens    dv       dv = pT do   along queries
                                          dp       dp = do vT   along head_dim
                                          dq       dq = ds k    along keys
                                          dk       dk = dsT q   along queries

Gradients (dy, do, ds) may have another format, and a scale: values of 1e-6 and less are below the range of a format
that has none of its own. `pow2-amax` multiplies such a tensor by the largest power of two that keeps its amax within
the format's full precision before quantising, and divides it off after; a number multiplies by that number. A power of
two changes no digit, so only the format does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from megatron.quantscope.flags.quantization import SCALE_RULES, UNQUANTIZED
from megatron.quantscope.flags.values import NO_GRAD_SCALE, POW2_AMAX
from megatron.quantscope.formats import Format, get_format
from megatron.quantscope.formats.dispatch import fake_quantize, fake_quantize_both
from megatron.quantscope.formats.scales import largest_magnitude
from megatron.quantscope.gemm.setting import check_grad_scale

ReduceAmax = Callable[[Tensor], Tensor]
"""Maximum of a scalar tensor over the ranks that hold shards of an operand."""
_Run = Callable[[Tensor, Format, str, Tensor | None], tuple[Tensor, ...]]
"""(tensor, format, scale rule, amax of the whole) -> quantised versions, distinct tensors."""
Gemms = Mapping[str, tuple[str, str]]

GRADIENT_OPERANDS = frozenset({"dy", "do", "ds"})
_MAX_SCALE_EXPONENT = 126  # so that neither 2^e nor 2^-e is subnormal or overflows in float32
_Self = TypeVar("_Self", bound="OperandFormats")


@dataclass(frozen=True, kw_only=True)
class OperandFormats:
    """The formats of the operands of a module's GEMMs; `LinearQuant` and `AttentionQuant` say which GEMMs those are.

    Attributes:
        gemms: GEMM -> operand -> name of its format, `none` where it is not quantised.
        scale_rule: `floor` or `rceil`, for formats with E8M0 scales.
        grad_scale: `none`, `pow2-amax` or a power of two, for the gradient operands that are quantised.
    """

    GEMMS: ClassVar[Gemms]

    gemms: Mapping[str, Mapping[str, str]]
    scale_rule: str = "floor"
    grad_scale: str | float = NO_GRAD_SCALE

    def __post_init__(self) -> None:
        given = {gemm: sorted(operands) for gemm, operands in self.gemms.items()}
        if given != {gemm: sorted(operands) for gemm, operands in self.GEMMS.items()}:
            raise ValueError(f"{type(self).__name__} has GEMMs {given}; they must be {dict(self.GEMMS)}")
        for name in {name for operands in self.gemms.values() for name in operands.values()} - {UNQUANTIZED}:
            get_format(name)
        if self.scale_rule not in SCALE_RULES:
            raise ValueError(f"unknown scale rule {self.scale_rule!r}: choose from {', '.join(SCALE_RULES)}")
        check_grad_scale(self.grad_scale)

    def formats(self) -> dict[str, Any]:
        """Plain JSON of all of this: the format of every operand by GEMM, `scale_rule` and `grad_scale`."""
        gemms: dict[str, Any] = {gemm: dict(operands) for gemm, operands in self.gemms.items()}
        return gemms | {"scale_rule": self.scale_rule, "grad_scale": self.grad_scale}

    @classmethod
    def from_formats(cls: type[_Self], data: Mapping[str, Any]) -> _Self:
        """The inverse of `formats`.

        Raises:
            ValueError: A GEMM, operand, format or rule is missing or unknown.
        """
        rules = {"scale_rule", "grad_scale"}
        missing = rules - set(data)
        if missing:
            raise ValueError(f"formats lack {', '.join(sorted(missing))}")
        gemms = {gemm: dict(operands) for gemm, operands in data.items() if gemm not in rules}
        return cls(gemms=gemms, scale_rule=data["scale_rule"], grad_scale=data["grad_scale"])

    def quantize(
        self, tensor: Tensor, gemm: str, operand: str, *, axis: int, reduce_amax: ReduceAmax | None = None
    ) -> Tensor:
        """An operand as its GEMM sees it: `tensor` itself where its format changes nothing.

        Args:
            tensor: The operand in high precision.
            gemm: The GEMM, such as `fprop`.
            operand: Its name there, such as `x`.
            axis: The contraction axis of the GEMM.
            reduce_amax: Where the tensor is a shard: makes the amax of its own elements that of the whole tensor.
        """
        return self._through(tensor, self.gemms[gemm][operand], operand, reduce_amax, partial(_along, axis))[0]

    def quantize_both(
        self, matrix: Tensor, row: tuple[str, str], column: tuple[str, str], *, reduce_amax: ReduceAmax | None = None
    ) -> tuple[Tensor, Tensor]:
        """An operand of two GEMMs, one of which contracts its rows' elements and the other its columns', read once.

        Args:
            matrix: The operand in high precision, [rows, columns].
            row: (GEMM, operand) that wants blocks along a row.
            column: (GEMM, operand) that wants blocks down a column.
            reduce_amax: As of `quantize`.
        """
        name = self.gemms[row[0]][row[1]]
        if name == self.gemms[column[0]][column[1]]:
            results = self._through(matrix, name, row[1], reduce_amax, _both)
            return results[0], results[-1]
        return (
            self.quantize(matrix, *row, axis=1, reduce_amax=reduce_amax),
            self.quantize(matrix, *column, axis=0, reduce_amax=reduce_amax),
        )

    def _through(
        self, tensor: Tensor, name: str, operand: str, reduce_amax: ReduceAmax | None, run: _Run
    ) -> tuple[Tensor, ...]:
        """The results of `run` on the operand, multiplied by its factor before and divided by it after."""
        if name == UNQUANTIZED or get_format(name).is_identity_for(tensor.dtype):
            return (tensor,)
        fmt = get_format(name)
        scale = None if operand not in GRADIENT_OPERANDS else self._scale_of(tensor, fmt, reduce_amax)
        if scale is None:
            return run(tensor, fmt, self.scale_rule, _whole_amax(tensor, fmt, reduce_amax))
        # fp16 has no room for the factor.
        scaled = (tensor.float() if tensor.dtype == torch.float16 else tensor) * scale
        results = run(scaled, fmt, self.scale_rule, _whole_amax(scaled, fmt, reduce_amax))
        return tuple(result.div_(scale).to(tensor.dtype) for result in results)

    def needs_amax(self, gemm: str, operand: str) -> bool:
        """Whether quantising this operand looks at the largest magnitude of all of it."""
        name = self.gemms[gemm][operand]
        if name == UNQUANTIZED:
            return False
        scaled = operand in GRADIENT_OPERANDS and self.grad_scale == POW2_AMAX
        return scaled or get_format(name).has_tensor_scale

    def _scale_of(self, tensor: Tensor, fmt: Format, reduce_amax: ReduceAmax | None) -> Tensor | None:
        if self.grad_scale == NO_GRAD_SCALE or tensor.numel() == 0:
            return None
        if self.grad_scale != POW2_AMAX:
            return torch.tensor(float(self.grad_scale), device=tensor.device)
        amax = largest_magnitude(tensor)
        return pow2_scale(amax if reduce_amax is None else reduce_amax(amax), fmt.full_precision_max)


class LinearQuant(OperandFormats):
    """Operand formats of a linear layer."""

    GEMMS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


class AttentionQuant(OperandFormats):
    """Operand formats of dot-product attention."""

    GEMMS = {
        "scores": ("q", "k"),
        "context": ("p", "v"),
        "dv": ("p", "do"),
        "dp": ("do", "v"),
        "dq": ("ds", "k"),
        "dk": ("ds", "q"),
    }


def pow2_scale(amax: Tensor, limit: float) -> Tensor:
    """The largest power of two s with s * amax <= limit, as a float32 scalar; 1 where amax is 0, Inf or NaN."""
    # frexp gives limit / amax = f * 2^e, 0.5 <= f < 1. In float64, a quotient of float32s never rounds up to 2^e.
    _, exponent = torch.frexp(torch.tensor(limit, dtype=torch.float64, device=amax.device) / amax.double())
    exponent = (exponent - 1).clamp_(-_MAX_SCALE_EXPONENT, _MAX_SCALE_EXPONENT)
    usable = (amax > 0) & torch.isfinite(amax)
    return torch.ldexp(torch.ones_like(amax, dtype=torch.float32), torch.where(usable, exponent, 0))


def _along(axis: int, tensor: Tensor, fmt: Format, scale_rule: str, amax: Tensor | None) -> tuple[Tensor, ...]:
    return (fake_quantize(tensor, fmt, axis=axis, scale_rule=scale_rule, amax=amax),)


def _both(matrix: Tensor, fmt: Format, scale_rule: str, amax: Tensor | None) -> tuple[Tensor, ...]:
    """Blocks along rows and blocks down columns; one result where there are no blocks."""
    along, down = fake_quantize_both(matrix, fmt, scale_rule=scale_rule, amax=amax)
    return (along,) if along is down else (along, down)


def _whole_amax(tensor: Tensor, fmt: Format, reduce_amax: ReduceAmax | None) -> Tensor | None:
    if reduce_amax is None or not fmt.has_tensor_scale or tensor.numel() == 0:
        return None
    return reduce_amax(largest_magnitude(tensor))
