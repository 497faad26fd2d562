"""A linear layer whose three GEMMs take quantised operands.

    T tokens (Megatron's [s, b] flattened row by row), K input features, N output features

    fprop   y_TN  = x_TK  w_NK^T    x and w quantised along K
    dgrad   dx_TK = dy_TN w_NK      dy and w along N
    wgrad   dw_NK = dy_TN^T x_TK    dy and x along T

Only x and w are kept for the backward pass, in high precision; their second quantisation, along the other axis, is made
there. So fprop and dgrad see two different versions of w, as in TransformerEngine's MXFP8.

Without quantisation the products are the very calls of megatron-core's linear, so that watching a model through a tap
does not change a bit of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.quantscope.gemm.matmul import matmul
from megatron.quantscope.gemm.operands import LinearQuant, ReduceAmax
from megatron.quantscope.gemm.tap import Tap

Accumulate = Callable[[Tensor, Tensor], Tensor | None]
"""(x_TK, dy_TN) -> what autograd shall get for w, having added dy^T x to the weight's main gradient itself."""


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    quant: LinearQuant | None,
    tap: Tap | None = None,
    accumulate: Accumulate | None = None,
    reduce_amax: ReduceAmax | None = None,
) -> Tensor:
    """Compute y = x w^T + bias with quantised GEMM operands in the forward and the backward pass.

    Args:
        x: [..., K].
        w: [N, K].
        bias: [N]; never quantised.
        quant: Formats of the operands; None: the unquantised GEMMs of megatron-core, bit for bit.
        tap: Sees the operands before they are quantised, and the results.
        accumulate: Takes over the weight gradient, given its (quantised) operands.
        reduce_amax: Where operands are shards over tensor-parallel ranks: the maximum of a scalar over these ranks.

    Returns:
        [..., N], in the dtype of x.
    """
    result: Tensor = _Linear.apply(x, w, bias, quant, tap, accumulate, reduce_amax)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        quant: LinearQuant | None,
        tap: Tap | None,
        accumulate: Accumulate | None,
        reduce_amax: ReduceAmax | None,
    ) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.quant, ctx.tap, ctx.accumulate, ctx.reduce_amax = quant, tap, accumulate, reduce_amax
        if tap:
            tap("forward", "pre", "input", x)
            tap("forward", "pre", "weight", w)
        y = _fprop(x, w, quant, reduce_amax)
        if tap:
            tap("forward", "post", "output", y)
        return y if bias is None else y + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        tap: Tap | None = ctx.tap
        needs_dx, needs_dw, needs_dbias = ctx.needs_input_grad[:3]
        dx = dw = dbias = None
        if tap:
            tap("backward", "pre", "grad_output", dy)
        dy_TN = dy.contiguous().view(-1, dy.shape[-1])
        along_N, along_T = _both_versions(dy_TN, ctx.quant, ctx.reduce_amax, needs_dx, needs_dw)
        if needs_dx:
            if tap:
                tap("backward", "pre", "weight", w)
            dx = _dgrad(dy if ctx.quant is None else along_N, w, ctx.quant, ctx.reduce_amax).view(x.shape)
            if tap:
                tap("backward", "post", "grad_input", dx)
        del along_N
        if needs_dw:
            dw = _wgrad(x.contiguous().view(-1, x.shape[-1]), along_T, ctx)
        if needs_dbias:
            dbias = dy_TN.sum(dim=0)
        return dx, dw, dbias, None, None, None, None


def _both_versions(
    dy_TN: Tensor, quant: LinearQuant | None, reduce_amax: ReduceAmax | None, needs_dx: bool, needs_dw: bool
) -> tuple[Tensor, Tensor]:
    """Dy as dgrad and as wgrad see it, from one read where both want it; what is not needed is dy itself."""
    if quant is None:
        return dy_TN, dy_TN
    if needs_dx and needs_dw:
        return quant.quantize_both(dy_TN, ("dgrad", "dy"), ("wgrad", "dy"), reduce_amax=reduce_amax)
    if needs_dx:
        return quant.quantize(dy_TN, "dgrad", "dy", axis=1, reduce_amax=reduce_amax), dy_TN
    return dy_TN, quant.quantize(dy_TN, "wgrad", "dy", axis=0, reduce_amax=reduce_amax) if needs_dw else dy_TN


def _fprop(x: Tensor, w_NK: Tensor, quant: LinearQuant | None, reduce_amax: ReduceAmax | None) -> Tensor:
    if quant is None:
        return torch.matmul(x, w_NK.t())
    x_TK = quant.quantize(x.reshape(-1, x.shape[-1]), "fprop", "x", axis=1, reduce_amax=reduce_amax)
    w_NK = quant.quantize(w_NK, "fprop", "w", axis=1, reduce_amax=reduce_amax)
    # Not a view of the product: upstream's loss writes into the logits, which autograd forbids for such a view.
    return matmul(x_TK.reshape(x.shape), w_NK.t())


def _dgrad(dy: Tensor, w_NK: Tensor, quant: LinearQuant | None, reduce_amax: ReduceAmax | None) -> Tensor:
    """Dx of an already quantised dy."""
    if quant is None:
        return dy.matmul(w_NK)
    return matmul(dy, quant.quantize(w_NK, "dgrad", "w", axis=0, reduce_amax=reduce_amax))


def _wgrad(x_TK: Tensor, dy_TN: Tensor, ctx: Any) -> Tensor | None:
    """What autograd gets for w, of an already quantised dy.

    The tap sees this call's weight gradient even where `accumulate` swallows it.
    """
    quant: LinearQuant | None = ctx.quant
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    if quant is not None:
        x_TK = quant.quantize(x_TK, "wgrad", "x", axis=0, reduce_amax=ctx.reduce_amax)
        product = matmul
    dw_NK = None
    if ctx.tap or ctx.accumulate is None:
        dw_NK = product(dy_TN.t(), x_TK)
    if ctx.tap:
        ctx.tap("backward", "post", "grad_weight", dw_NK)
    return dw_NK if ctx.accumulate is None else ctx.accumulate(x_TK, dy_TN)
