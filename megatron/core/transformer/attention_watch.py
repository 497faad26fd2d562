"""Show what an attention reads and gives, and the gradients, whatever kernel computes it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron.quantscope.gemm import Tap


def watched(
    forward: Callable[..., Tensor],
    tap: Tap,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **options: Any,
) -> Tensor:
    """`forward(query, key, value, ...)`; operands, output and their gradients go to `tap`."""
    # A view has a gradient of its own: that of this use, whatever else the operand feeds.
    operands = {"query": query.view_as(query), "key": key.view_as(key), "value": value.view_as(value)}
    for name, tensor in operands.items():
        tap("forward", "pre", name, tensor)
    output = forward(*operands.values(), *args, **options)
    tap("forward", "post", "output", output)
    if output.requires_grad:
        output.register_hook(functools.partial(tap, "backward", "pre", "grad_output"))
    for name, tensor in operands.items():
        if tensor.requires_grad:
            tensor.register_hook(functools.partial(tap, "backward", "post", f"grad_{name}"))
    return output
