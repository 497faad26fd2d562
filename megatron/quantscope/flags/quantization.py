"""Flags that say what is quantised, and how (docs/quantization.md)."""

from __future__ import annotations

from megatron.quantscope.flags.presets import PRESETS
from megatron.quantscope.flags.table import Flag, FlagGroup
from megatron.quantscope.flags.values import grad_scale, non_negative_int

UNQUANTIZED = "none"
QUANT_TYPES = (
    UNQUANTIZED,
    "bf16",
    "fp16",
    "mxfp8",
    "mxfp8_e4m3",
    "mxfp8_e5m2",
    "mxfp6_e2m3",
    "mxfp6_e3m2",
    "mxfp4",
    "nvfp4",
    "hifp8",
    "fp8_e4m3",
    "fp8_e5m2",
)
QUANT_SCOPES = ("linear", "attention", "both")
SCALE_RULES = ("floor", "rceil")
OPERANDS = ("x", "w", "dy")
GEMMS = ("fprop", "dgrad", "wgrad")

QUANTIZATION_FLAGS = FlagGroup(
    "quantisation",
    (
        Flag(
            name="--quant-type",
            choices=QUANT_TYPES,
            metavar="TYPE",
            help="number format of the GEMM operands: " + ", ".join(QUANT_TYPES) + " (default none: upstream's own "
            "path, untouched; environment CUSTOM_QUANT_TYPE)",
        ),
        Flag(
            name="--quant-scope",
            choices=QUANT_SCOPES,
            help="which GEMMs are quantised (default both)",
        ),
        Flag(
            name="--quant-backward-type",
            choices=QUANT_TYPES,
            metavar="TYPE",
            help="format of dy, do and ds, the gradient operands (default: the forward type)",
        ),
        Flag(
            name="--quant-scale-rule",
            choices=SCALE_RULES,
            help="how the scale of an MX block follows from its amax: floor is OCP's rule, rceil is TransformerEngine's"
            " (default floor)",
        ),
        Flag(
            name="--quant-grad-scale",
            type=grad_scale,
            metavar="none|pow2-amax|NUMBER",
            help="power of two multiplied on before and divided off after quantising a gradient operand (default "
            "pow2-amax for hifp8 and fp16, none for the others)",
        ),
        Flag(
            name="--quant-operands",
            nargs="+",
            choices=OPERANDS + GEMMS,
            metavar="PART",
            help="quantise only these operands (x, w, dy) of these GEMMs (fprop, dgrad, wgrad) of the linear layers; "
            "naming no operand or no GEMM means all of them (default: everything)",
        ),
        Flag(
            name="--quant-skip-first-layers",
            type=non_negative_int,
            metavar="N",
            help="leave the first N transformer layers unquantised (default 0)",
        ),
        Flag(
            name="--quant-skip-last-layers",
            type=non_negative_int,
            metavar="N",
            help="leave the last N transformer layers unquantised (default 0)",
        ),
        Flag(
            name="--quant-preset",
            choices=tuple(PRESETS),
            metavar="NAME",
            help="the flags of a published recipe: " + ", ".join(PRESETS) + "; what is given by hand beside it wins "
            "(docs/quantization.md says what each leaves out)",
        ),
        Flag(
            name="--quant-recipe",
            metavar="FILE.yaml",
            help="patterns of module names and their formats, the first match wins; instead of all flags above, and of "
            "CUSTOM_QUANT_TYPE (docs/quantization.md has the keys)",
        ),
    ),
)
