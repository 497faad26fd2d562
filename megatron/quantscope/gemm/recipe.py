"""From the flags to the formats of every GEMM: which module is quantised, and what its operands become.

One `QuantConfig` a run. It answers for each module, by its place in the network, with the formats of its operands or
with None, which means upstream's own path: type `none`, a scope that leaves the module out, a skipped layer, or a
module outside the transformer layers (the LM head). Forward operands (x, w; q, k, p, v) have the run's type; gradient
operands (dy; do, ds) have the backward type, which is the run's type unless another is given.
"""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass

from megatron.quantscope.flags.quantization import (
    GEMMS,
    OPERANDS,
    QUANT_SCOPES,
    QUANT_TYPES,
    SCALE_RULES,
    UNQUANTIZED,
)
from megatron.quantscope.formats import get_format
from megatron.quantscope.gemm.operands import (
    GRADIENT_OPERANDS,
    NO_GRAD_SCALE,
    POW2_AMAX,
    AttentionQuant,
    LinearQuant,
    check_grad_scale,
)

QUANT_TYPE_VARIABLE = "CUSTOM_QUANT_TYPE"
DEFAULT_GRAD_SCALES = {"hifp8": POW2_AMAX, "fp16": POW2_AMAX}
"""Formats whose range no scale of their own moves to where gradients are."""

TABLE_HEADER = ("module", "layers", "GEMM", "operand", "format", "along", "scale rule", "gradient scale")
CONTRACTION_AXES = {
    "fprop": "K (input features)",
    "dgrad": "N (output features)",
    "wgrad": "T (tokens)",
    "scores": "head dimension",
    "context": "keys",
    "dv": "queries",
    "dp": "head dimension",
    "dq": "keys",
    "dk": "queries",
}


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """What is quantised, and how: the values of the quantisation flags.

    Attributes:
        quant_type: Format of the operands, or `none`.
        scope: `linear`, `attention` or `both`.
        backward_type: Format of the gradient operands, or `none`; None: the same as `quant_type`.
        scale_rule: `floor` or `rceil`, for formats with E8M0 scales.
        grad_scale: `none`, `pow2-amax` or a power of two; None: by the backward type (`DEFAULT_GRAD_SCALES`).
        operands: Linear operands (x, w, dy) and GEMMs (fprop, dgrad, wgrad) to quantise; naming none of a kind means
            all of that kind.
        skip_first_layers: This many layers at the start are not quantised.
        skip_last_layers: This many layers at the end are not quantised.
    """

    quant_type: str = UNQUANTIZED
    scope: str = "both"
    backward_type: str | None = None
    scale_rule: str = "floor"
    grad_scale: str | float | None = None
    operands: tuple[str, ...] = ()
    skip_first_layers: int = 0
    skip_last_layers: int = 0

    def __post_init__(self) -> None:
        _check_one_of("--quant-type", self.quant_type, QUANT_TYPES)
        _check_one_of("--quant-backward-type", self.gradient_type, QUANT_TYPES)
        _check_one_of("--quant-scope", self.scope, QUANT_SCOPES)
        _check_one_of("--quant-scale-rule", self.scale_rule, SCALE_RULES)
        for part in self.operands:
            _check_one_of("--quant-operands", part, OPERANDS + GEMMS)
        check_grad_scale(self.resolved_grad_scale)
        if self.skip_first_layers < 0 or self.skip_last_layers < 0:
            raise ValueError("--quant-skip-first-layers and --quant-skip-last-layers must be >= 0")
        if self.quant_type == UNQUANTIZED and self.gradient_type != UNQUANTIZED:
            raise ValueError(f"--quant-backward-type {self.backward_type} needs a --quant-type other than none")

    @classmethod
    def from_namespace(cls, namespace: Namespace) -> QuantConfig:
        """The configuration of parsed flags (`megatron.quantscope.flags.QUANTIZATION_FLAGS`).

        Where `--quant-type` was not given, the environment variable CUSTOM_QUANT_TYPE stands in for it.

        Raises:
            ValueError: A value is not allowed; the message says which and what is.
        """
        quant_type = namespace.quant_type
        if quant_type is None:
            quant_type = os.environ.get(QUANT_TYPE_VARIABLE) or UNQUANTIZED
            _check_one_of(QUANT_TYPE_VARIABLE, quant_type, QUANT_TYPES)
        return cls(
            quant_type=quant_type,
            scope=namespace.quant_scope,
            backward_type=namespace.quant_backward_type,
            scale_rule=namespace.quant_scale_rule,
            grad_scale=namespace.quant_grad_scale,
            operands=tuple(namespace.quant_operands or ()),
            skip_first_layers=namespace.quant_skip_first_layers,
            skip_last_layers=namespace.quant_skip_last_layers,
        )

    @property
    def label(self) -> str:
        """The run's quant type, as names of files and folders carry it."""
        return self.quant_type

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

    def linear(self, layer_idx: int | None, num_layers: int) -> LinearQuant | None:
        """The operand formats of a linear layer of transformer layer `layer_idx` (from 0; None: outside the layers)."""
        if not self._quantizes("linear", layer_idx, num_layers):
            return None
        gemms = {
            gemm: {operand: self._linear_type(gemm, operand) for operand in operands}
            for gemm, operands in LinearQuant.GEMMS.items()
        }
        return LinearQuant(gemms=gemms, scale_rule=self.scale_rule, grad_scale=self.resolved_grad_scale)

    def attention(self, layer_idx: int | None, num_layers: int) -> AttentionQuant | None:
        """The operand formats of the attention of transformer layer `layer_idx` (from 0; None: outside the layers)."""
        if not self._quantizes("attention", layer_idx, num_layers):
            return None
        gemms = {
            gemm: {operand: self._type_of(operand) for operand in operands}
            for gemm, operands in AttentionQuant.GEMMS.items()
        }
        return AttentionQuant(gemms=gemms, scale_rule=self.scale_rule, grad_scale=self.resolved_grad_scale)

    def table(self, num_layers: int) -> list[tuple[str, ...]]:
        """Rows for the start-up table, a header first; only the header where nothing is quantised.

        The columns are those of `TABLE_HEADER`; a rule that does not concern an operand is "-".
        """
        rows: list[tuple[str, ...]] = [TABLE_HEADER]
        layers = range(self.skip_first_layers, num_layers - self.skip_last_layers)
        if not layers:
            return rows
        span = f"{layers[0]}-{layers[-1]} of {num_layers}"
        quants = {"linear": self.linear(layers[0], num_layers), "attention": self.attention(layers[0], num_layers)}
        for module, quant in quants.items():
            for gemm, operands in quant.gemms.items() if quant else ():
                for operand, name in operands.items():
                    rules = self._rules(operand, name)
                    rows.append((module, span, gemm, operand, name, CONTRACTION_AXES[gemm], *rules))
        return rows

    def _quantizes(self, module: str, layer_idx: int | None, num_layers: int) -> bool:
        if self.quant_type == UNQUANTIZED or self.scope not in (module, "both") or layer_idx is None:
            return False
        return self.skip_first_layers <= layer_idx < num_layers - self.skip_last_layers

    def _type_of(self, operand: str) -> str:
        return self.gradient_type if operand in GRADIENT_OPERANDS else self.quant_type

    def _linear_type(self, gemm: str, operand: str) -> str:
        named = self._is_named(gemm, GEMMS) and self._is_named(operand, OPERANDS)
        return self._type_of(operand) if named else UNQUANTIZED

    def _is_named(self, part: str, kind: tuple[str, ...]) -> bool:
        named = [name for name in self.operands if name in kind]
        return not named or part in named

    def _rules(self, operand: str, name: str) -> tuple[str, str]:
        if name == UNQUANTIZED:
            return "-", "-"
        scale_rule = self.scale_rule if get_format(name).scale == "e8m0" else "-"
        return scale_rule, str(self.resolved_grad_scale) if operand in GRADIENT_OPERANDS else "-"


def _check_one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{flag} {value!r} is not allowed: choose from {', '.join(allowed)}")
