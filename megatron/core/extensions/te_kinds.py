"""What TransformerEngine's modules are called in a capture, and how their tensors lie over ranks (see `kinds`).

They gather and reduce themselves, so what is shown lies outside of that: under sequence parallelism the input of a
column-parallel layer and the output of a row-parallel one are slices of the sequence, and a sum over ranks is taken
already. `_stages` says which tensors are not simply the operands and results of the GEMM.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from megatron.core.extensions import transformer_engine as te
from megatron.core.kinds import ATTENTION_LAYOUT, HIDDEN, LINEAR, Kind
from megatron.core.probe import tensor_parallel_group
from megatron.core.shards import Layout, features, slice_sums, slices, token_sums, tokens
from megatron.quantscope.capture.metadata import DEQUANTIZED, PRE_NORM, REDUCED

_OUTSIDE = (slices(0), tokens(0))  # [s, b, hidden] before a gather, after a reduce-scatter
_SPLIT = (features(HIDDEN), tokens(0))
_COLUMN: Layout = {
    **dict.fromkeys(("input", "grad_input"), _OUTSIDE),
    "weight": (features(0),),
    **dict.fromkeys(("output", "grad_output"), _SPLIT),
    "grad_weight": (features(0), token_sums()),
}
_ROW: Layout = {
    **dict.fromkeys(("input", "grad_input"), _SPLIT),
    "weight": (features(1),),
    **dict.fromkeys(("output", "grad_output"), _OUTSIDE),
    "grad_weight": (features(1), token_sums()),
}
_COPIED: Layout = {  # every tensor-parallel rank has the whole weight, and its own tokens under sequence parallelism
    **dict.fromkeys(("input", "grad_input", "output", "grad_output"), _OUTSIDE),
    "grad_weight": (slice_sums(), token_sums()),
}
_NO_SUMS: frozenset[str] = frozenset()


def te_kinds() -> dict[type[torch.nn.Module], Kind]:
    """The kinds of the wrappers that this megatron-core has; none where TransformerEngine is not installed."""
    if not te.HAVE_TE:
        return {}
    column = _linear(_COLUMN, sums={"grad_input"})
    row = _linear(_ROW, sums={"output"})
    kinds = {
        te.TELinear: _linear(_COPIED),
        te.TEColumnParallelLinear: column,
        te.TELayerNormColumnParallelLinear: _linear(_COLUMN, pre_norm={"input", "grad_input"}),
        te.TERowParallelLinear: row,
        te.TEColumnParallelGroupedLinear: column,  # these two refuse the probe, by name
        te.TERowParallelGroupedLinear: row,
        te.TEDotProductAttention: Kind(
            layer_type="attention", component="FA", quant="attention", layout=ATTENTION_LAYOUT, facts=_head_facts
        ),
    }
    return {each: kind for each, kind in kinds.items() if each is not None}


def _linear(layout: Layout, *, sums: Any = _NO_SUMS, pre_norm: Any = _NO_SUMS) -> Kind:
    return Kind(**LINEAR, layout=layout, facts=functools.partial(_stages, sums=sums, pre_norm=pre_norm))


def _stages(layer: torch.nn.Module, *, sums: Any, pre_norm: Any) -> dict[str, Any]:
    """The stage of each tensor that is not simply an operand or a result of the GEMM."""
    stages = dict.fromkeys(pre_norm, PRE_NORM)
    if tensor_parallel_group(layer).size() > 1:
        stages |= dict.fromkeys(sums, REDUCED)
    if te.is_low_precision(getattr(layer, "weight", None)):
        stages["weight"] = DEQUANTIZED
    return {"stages": stages}


def _head_facts(module: torch.nn.Module) -> dict[str, Any]:
    """The head_dim and the softmax_scale of an attention, as rows of it tell them."""
    head_dim = int(module.config.kv_channels)
    return {
        "head_dim": head_dim,
        "softmax_scale": float(getattr(module.config, "softmax_scale", None) or 1 / math.sqrt(head_dim)),
    }
