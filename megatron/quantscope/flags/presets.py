"""Published training recipes by name: the quantisation flags that come nearest to each, and what they leave out.

A preset is nothing but values of flags: whatever is given by hand beside it wins. What a recipe does beyond choosing
formats (other rounding, transforms, amax of earlier steps) is not imitated but named, in `differs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_TE = "TransformerEngine 000b637, common/recipe"
_LINEARS_ONLY = {"quant_scope": "linear"}
_E5M2_BACKWARD = {"quant_type": "fp8_e4m3", "quant_backward_type": "fp8_e5m2"}
_ENDS = "the layers at the ends that the paper keeps in BF16: add --quant-skip-first-layers, --quant-skip-last-layers"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One published recipe.

    Attributes:
        name: As `--quant-preset` takes it.
        title: What it stands for.
        flags: Destination of a quantisation flag -> value; flags that are not named keep their defaults.
        source: Paper or library, with its version.
        differs: What of the recipe these flags do not reproduce.
    """

    name: str
    title: str
    flags: Mapping[str, Any] = field(hash=False)
    source: str
    differs: tuple[str, ...]


_ALL = (
    Preset(
        name="ocp",
        title="OCP MX v1.0 with MXFP8 elements, every GEMM, as microxcaling emulates it",
        flags={"quant_type": "mxfp8", "quant_scale_rule": "floor", "quant_scope": "both"},
        source="OCP Microscaling v1.0 (section 6.3); microxcaling 7bc4195, w_elem_format = a_elem_format = fp8_e4m3, "
        "the backward formats left to follow them",
        differs=(
            "microxcaling's default rounding of elements, half away from zero: OCP's ties to even are kept",
            "bfloat16 rounding of vector operations (its option bfloat)",
            "blocks of wgrad along the last but one axis: here they run over [s, b] flattened",
        ),
    ),
    Preset(
        name="te-mxfp8",
        title="TransformerEngine MXFP8BlockScaling",
        flags={"quant_type": "mxfp8", "quant_scale_rule": "rceil", **_LINEARS_ONLY},
        source=f"{_TE}, MXFP8BlockScaling() (E4M3 everywhere); arXiv 2506.08027",
        differs=("FP8 attention (fp8_dpa, off by default)",),
    ),
    Preset(
        name="te-fp8-current",
        title="TransformerEngine Float8CurrentScaling, HYBRID",
        flags={**_E5M2_BACKWARD, **_LINEARS_ONLY},
        source=f"{_TE}, Float8CurrentScaling(): E4M3 forward, E5M2 gradients, a float32 scale a tensor",
        differs=(
            "accumulation in fewer bits in fprop (use_split_accumulator=False)",
            "how the amax of a tensor's shards is reduced: here always over all ranks that hold a part",
        ),
    ),
    Preset(
        name="te-fp8-delayed",
        title="TransformerEngine DelayedScaling, HYBRID",
        flags={**_E5M2_BACKWARD, **_LINEARS_ONLY},
        source=f"{_TE}, DelayedScaling(): E4M3 forward, E5M2 gradients",
        differs=(
            "scales from the amax of earlier steps (amax_history_len 1024): here each tensor's own is taken, and so "
            "nothing saturates",
            "accumulation in fewer bits in fprop (_2X_ACC_FPROP = False in pytorch/module/base.py)",
        ),
    ),
    Preset(
        name="te-nvfp4",
        title="TransformerEngine NVFP4BlockScaling",
        flags={"quant_type": "nvfp4", **_LINEARS_ONLY},
        source=f"{_TE}, NVFP4BlockScaling(); arXiv 2509.25149",
        differs=(
            "random Hadamard transform of x and dy in wgrad",
            "stochastic rounding of dy",
            "one scale a 16 x 16 block of weights: here blocks are 1 x 16, so fprop and dgrad see different weights",
            _ENDS,
        ),
    ),
    Preset(
        name="mxfp4-backward",
        title="Training LLMs with MXFP4: the backward GEMMs alone",
        flags={"quant_type": "mxfp4", "quant_operands": ("dgrad", "wgrad"), **_LINEARS_ONLY},
        source="arXiv 2502.20586",
        differs=(
            "stochastic rounding, of operands times 3/4 so that none is clipped (products times 16/9 undo it)",
            "random Hadamard transform along the contraction axis",
        ),
    ),
    Preset(
        name="hif8",
        title="HiF8 everywhere, gradients moved into its range by a power of two",
        flags={"quant_type": "hifp8", "quant_grad_scale": "pow2-amax", "quant_scope": "both"},
        source="arXiv 2409.16626: one format for forward and backward",
        differs=(
            "hybrid rounding (partly stochastic) of the backward: every operand is rounded half away from zero",
            "how gradients are moved into the range: one factor a gradient operand is this project's way",
        ),
    ),
)

PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _ALL}
