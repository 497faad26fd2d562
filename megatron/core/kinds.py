"""What each class of module is called in a capture, and how its tensors lie over the ranks: the table `KINDS`.

Nothing else branches on a class. A module whose class is not in the table is neither quantised nor kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.probe import ATTENTION_PROBS
from megatron.core.shards import Layout, features, summands, token_sums, tokens
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention, head_facts
from megatron.core.transformer.flash_attention import FlashAttention


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How the modules of one class are quantised and kept.

    Attributes:
        layer_type: Part of a captured tensor's name.
        component: Part of a captured tensor's name.
        quant: Name of the QuantConfig method that says how such a module is quantised.
        layout: How its tensors lie over ranks.
        gathered: Tensors that every rank of the tensor-parallel group holds alike under sequence parallelism, since
            they were gathered for the GEMM: kept by the group's first rank only.
        on_request: Tensors that the module shows only where a point of this name was asked for.
        facts: What such a module says of itself: further arguments of `CaptureSession.site`.
    """

    layer_type: str
    component: str
    quant: str
    layout: Layout
    gathered: frozenset[str] = frozenset()
    on_request: frozenset[str] = frozenset()
    facts: Callable[[torch.nn.Module], dict[str, Any]] = lambda _: {}


HEADS, HIDDEN = 2, -1  # dimensions of q, k, v [s, b, heads, d] and of [s, b, hidden]
LINEAR = {"layer_type": "linear", "component": "linear", "quant": "linear"}
ATTENTION_LAYOUT: Layout = {
    **dict.fromkeys(("query", "key", "value", "grad_query", "grad_key", "grad_value"), (features(HEADS), tokens(0))),
    **dict.fromkeys(("output", "grad_output"), (features(HIDDEN), tokens(0))),
}

KINDS: dict[type[torch.nn.Module], Kind] = {
    ColumnParallelLinear: Kind(
        **LINEAR,
        layout={
            "input": (tokens(0),),
            "weight": (features(0),),
            **dict.fromkeys(("output", "grad_output"), (features(HIDDEN), tokens(0))),
            "grad_input": (summands(), tokens(0)),
            "grad_weight": (features(0), token_sums()),
        },
        gathered=frozenset({"input"}),
    ),
    RowParallelLinear: Kind(
        **LINEAR,
        layout={
            **dict.fromkeys(("input", "grad_input"), (features(HIDDEN), tokens(0))),
            "weight": (features(1),),
            "output": (summands(), tokens(0)),
            "grad_output": (tokens(0),),
            "grad_weight": (features(1), token_sums()),
        },
        gathered=frozenset({"grad_output"}),
    ),
    DotProductAttention: Kind(
        layer_type="attention",
        component="FA",
        quant="attention",
        layout={**ATTENTION_LAYOUT, ATTENTION_PROBS: (features(1), tokens(2))},
        on_request=frozenset({ATTENTION_PROBS}),
        facts=head_facts,
    ),
    FlashAttention: Kind(
        layer_type="attention", component="FA", quant="attention", layout=ATTENTION_LAYOUT, facts=head_facts
    ),
}
