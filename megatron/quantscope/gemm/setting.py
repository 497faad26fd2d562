"""How the GEMMs of one module are quantised, in the words of the flags: a format forward, one backward, and the rules.

`QuantConfig` has one for the whole run, a recipe file one a rule; here each becomes the formats of every operand.
Imports no torch, so that a command line is checked before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.quantscope.flags.quantization import GEMMS, OPERANDS, UNQUANTIZED
from megatron.quantscope.flags.values import GRAD_SCALE_RULES, NO_GRAD_SCALE, POW2_AMAX

if TYPE_CHECKING:
    from megatron.quantscope.gemm.operands import AttentionQuant, LinearQuant

_POWER_OF_TWO_FRACTION = 0.5  # of math.frexp
DEFAULT_GRAD_SCALES = {"hifp8": POW2_AMAX, "fp16": POW2_AMAX}
"""Formats whose range no scale of their own moves to where gradients are."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Formats and rules of one module's GEMMs. Values are not checked here.

    Attributes:
        quant_type: Format of the operands x, w, q, k, p and v, or `none`.
        backward_type: Format of the gradient operands dy, do and ds, or `none`; None: the same as `quant_type`.
        scale_rule: `floor` or `rceil`, for formats with E8M0 scales.
        grad_scale: `none`, `pow2-amax` or a power of two; None: by the backward type (`DEFAULT_GRAD_SCALES`).
        operands: Linear operands (x, w, dy) and GEMMs (fprop, dgrad, wgrad) to quantise; naming none of a kind means
            all of that kind. Attention has other operands, and all of them are quantised.
    """

    quant_type: str = UNQUANTIZED
    backward_type: str | None = None
    scale_rule: str = "floor"
    grad_scale: str | float | None = None
    operands: tuple[str, ...] = ()

    @property
    def gradient_type(self) -> str:
        """Format of the gradient operands."""
        return self.quant_type if self.backward_type is None else self.backward_type

    @property
    def resolved_grad_scale(self) -> str | float:
        """The gradient scale, the backward type's default filled in."""
        if self.grad_scale is not None:
            return self.grad_scale
        return DEFAULT_GRAD_SCALES.get(self.gradient_type, NO_GRAD_SCALE)

    def linear(self) -> LinearQuant | None:
        """The operand formats of a linear layer; None: upstream's own path."""
        from megatron.quantscope.gemm.operands import LinearQuant

        if self.quant_type == UNQUANTIZED:
            return None
        gemms = {
            gemm: {operand: self._linear_type(gemm, operand) for operand in operands}
            for gemm, operands in LinearQuant.GEMMS.items()
        }
        return LinearQuant(gemms=gemms, scale_rule=self.scale_rule, grad_scale=self.resolved_grad_scale)

    def attention(self) -> AttentionQuant | None:
        """The operand formats of dot-product attention; None: upstream's own path."""
        from megatron.quantscope.gemm.operands import AttentionQuant

        if self.quant_type == UNQUANTIZED:
            return None
        gemms = {
            gemm: {operand: self._type_of(operand) for operand in operands}
            for gemm, operands in AttentionQuant.GEMMS.items()
        }
        return AttentionQuant(gemms=gemms, scale_rule=self.scale_rule, grad_scale=self.resolved_grad_scale)

    def _type_of(self, operand: str) -> str:
        from megatron.quantscope.gemm.operands import GRADIENT_OPERANDS

        return self.gradient_type if operand in GRADIENT_OPERANDS else self.quant_type

    def _linear_type(self, gemm: str, operand: str) -> str:
        named = self._is_named(gemm, GEMMS) and self._is_named(operand, OPERANDS)
        return self._type_of(operand) if named else UNQUANTIZED

    def _is_named(self, part: str, kind: tuple[str, ...]) -> bool:
        named = [name for name in self.operands if name in kind]
        return not named or part in named


def check_one_of(what: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ValueError with one line unless `value` is among the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{what} {value!r} is not allowed: choose from {', '.join(allowed)}")


def check_grad_scale(value: str | float) -> None:
    """Raise ValueError unless the value is one of the rules or a power of two."""
    known = value in GRAD_SCALE_RULES
    if not known and (isinstance(value, str) or not value > 0 or math.frexp(value)[0] != _POWER_OF_TWO_FRACTION):
        raise ValueError(
            f"gradient scale {value!r} is not allowed: give {', '.join(GRAD_SCALE_RULES)} or a power of two"
        )
