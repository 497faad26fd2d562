"""Dot-product attention for autograd whose six GEMMs take quantised operands (`attention_passes` says how)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.quantscope.gemm.attention_blocks import ScoreMask
from megatron.quantscope.gemm.attention_passes import Setting, backward_pass, forward_pass
from megatron.quantscope.gemm.operands import AttentionQuant, ReduceAmax
from megatron.quantscope.gemm.tap import Tap


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    quant: AttentionQuant,
    softmax_scale: float,
    causal: bool = True,
    mask: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    dropout: float = 0.0,
    seed: Callable[[], int] | None = None,
    softmax_in_fp32: bool = True,
    tap: Tap | None = None,
    show_probabilities: Callable[[Tensor], None] | None = None,
    reduce_amax: ReduceAmax | None = None,
) -> Tensor:
    """softmax(softmax_scale * q k^T) v with quantised GEMM operands in the forward and the backward pass.

    Args:
        q: [s_q, b, heads, d].
        k: [s_k, b, groups, d]; heads is a multiple of groups.
        v: [s_k, b, groups, d].
        quant: Formats of the operands.
        softmax_scale: Multiplied on the scores, and on dq and dk, after their GEMMs.
        causal: Hide keys at positions after the query's.
        mask: Bool, True = hidden, broadcastable to [b, 1, s_q, s_k]; hides in addition to `causal`.
        query_positions: Int [s_q], for context parallelism; None: 0, 1, 2, ...
        key_positions: Int [s_k]; None: 0, 1, 2, ...
        dropout: Probability that an element of p becomes zero.
        seed: Draws the seed of the dropout masks; called once, and only where dropout > 0.
        softmax_in_fp32: Softmax in float32 for 16-bit inputs; else in their dtype.
        tap: Sees q, k, v, o and their gradients, in high precision and in these shapes.
        show_probabilities: Called in the forward with p as the softmax gave it, before dropout and before it is
            quantised: [b, heads, s_q, s_k] in the dtype of q. p is held whole for it, and only for it.
        reduce_amax: Maximum of a scalar over the ranks that have the other heads; for q, k, v and do.

    Returns:
        [s_q, b, heads * d], in the dtype of q.

    Raises:
        ValueError: Shapes do not fit, or dropout without a seed.
    """
    _check_shapes(q, k, v)
    setting = Setting(
        quant=quant,
        softmax_scale=softmax_scale,
        mask=_score_mask(q, k, causal, mask, query_positions, key_positions),
        dropout=dropout,
        seed=_drawn_seed(dropout, seed),
        softmax_in_fp32=softmax_in_fp32,
        tap=tap,
        show_probabilities=show_probabilities,
        reduce_amax=reduce_amax,
    )
    result: Tensor = _Attention.apply(q, k, v, setting)  # type: ignore[no-untyped-call]
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.setting = setting
        if setting.tap:
            for name, tensor in (("query", q), ("key", k), ("value", v)):
                setting.tap("forward", "pre", name, tensor)
        o = forward_pass(q, k, v, setting).flatten(2)
        if setting.tap:
            setting.tap("forward", "post", "output", o)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        setting: Setting = ctx.setting
        if setting.tap:
            setting.tap("backward", "pre", "grad_output", do)
        gradients = backward_pass(q, k, v, do.reshape(*q.shape[:3], -1), setting, ctx.needs_input_grad[:3])
        if setting.tap:
            for name, gradient in zip(("grad_query", "grad_key", "grad_value"), gradients, strict=True):
                if gradient is not None:
                    setting.tap("backward", "post", name, gradient)
        return *gradients, None


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """One line for the first thing that does not fit."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"{shapes}: each must be [sequence, batch, heads, head_dim]")
    if k.shape[:3] != v.shape[:3] or q.shape[1] != k.shape[1] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{shapes}: k and v must share all but head_dim, and q must have their batch and k's head_dim")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{shapes}: {q.shape[2]} query heads are not a multiple of {k.shape[2]} KV heads")


def _score_mask(
    q: Tensor,
    k: Tensor,
    causal: bool,
    mask: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
) -> ScoreMask:
    full = (q.shape[1], 1, q.shape[0], k.shape[0])
    if mask is not None:
        padded = (1,) * (len(full) - mask.dim()) + tuple(mask.shape)
        if len(padded) > len(full) or any(size not in (1, wanted) for size, wanted in zip(padded, full, strict=True)):
            raise ValueError(f"the mask is {list(mask.shape)}; it must be broadcastable to {list(full)}")
    return ScoreMask(
        s_q=q.shape[0],
        s_k=k.shape[0],
        heads=q.shape[2],
        causal=causal,
        mask=mask,
        query_positions=query_positions,
        key_positions=key_positions,
    )


def _drawn_seed(dropout: float, seed: Callable[[], int] | None) -> int | None:
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout {dropout} is not allowed: it must be in [0, 1)")
    if dropout == 0.0:
        return None
    if seed is None:
        raise ValueError(f"dropout {dropout} needs a seed to draw from")
    return seed()
