"""Attention with quantised operands, in blocks: what the forward and the backward pass compute.

    h query heads (flattened over samples), Q queries, K keys, D head_dim

    scores   s_hQK  = q k^T           along D        q, k unscaled; rounded to the compute dtype, then scaled
             p      = softmax(scale * s, hidden ones filled with -10000), then dropout
    context  o_hQD  = p v             along K        p after dropout, in the compute dtype
    dv       dv_hKD = p^T do          along Q
    dp       dp_hQK = do v^T          along D
             ds     = p * (dp - rowsum(p * dp))      p as the softmax gave it: unquantised, before dropout
    dq       dq_hQD = ds k            along K        then scaled
    dk       dk_hKD = ds^T q          along Q        then scaled

q, k, v and do are whole and quantised once a GEMM, k and v at their own (KV) heads. s, p, dp and ds exist a block at a
time (`attention_blocks`); the backward pass computes s and p again instead of keeping them. Where a head has several
blocks of rows, its dk and dv are summed over them in float32 and rounded once. GQA: each query head has its own
product; the dk and dv of a group are then summed in the compute dtype, as the gradient of megatron-core's repeated
heads is.

What a format or `pow2-amax` derives from the largest magnitude of a whole tensor is taken over all of q, k, v or do;
for p and ds, which are never whole, over the rows of one head in one block.

Who wants to see p whole gets it from the forward pass, collected block by block; nobody else pays for it.

Dropout draws from a generator of its own, seeded by one number from the caller's, in the order of the blocks, and again
in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.quantscope.gemm.attention_blocks import Block, ScoreMask, score_blocks
from megatron.quantscope.gemm.matmul import matmul, matmul_unrounded
from megatron.quantscope.gemm.operands import AttentionQuant, ReduceAmax
from megatron.quantscope.gemm.tap import Tap

HIDDEN_SCORE = -10000.0  # megatron-core's fill of masked scores
_ALONG_SEQUENCE, _ALONG_HEAD_DIM = 1, 2  # axes of [heads, sequence, head_dim]
_ALONG_QUERIES, _ALONG_KEYS = 1, 2  # axes of [heads, queries, keys]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the two passes of one call share.

    Attributes:
        quant: Formats of the operands.
        softmax_scale: Multiplied on after the GEMMs.
        mask: Which scores are hidden.
        dropout: Probability that an element of p becomes zero.
        seed: Of the dropout masks; None: no dropout.
        softmax_in_fp32: Softmax in float32 for 16-bit inputs.
        tap: Sees the operands and results.
        show_probabilities: Sees the whole p [b, heads, Q, K] of the forward pass, before dropout; None: it is not made.
        reduce_amax: Maximum of a scalar over the ranks that hold other heads.
    """

    quant: AttentionQuant
    softmax_scale: float
    mask: ScoreMask
    dropout: float
    seed: int | None
    softmax_in_fp32: bool
    tap: Tap | None
    show_probabilities: Callable[[Tensor], None] | None
    reduce_amax: ReduceAmax | None


def forward_pass(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Tensor:
    """Return o [s_q, b, heads, d] of q [s_q, b, heads, d] and k, v [s_k, b, groups, d]."""
    q_hQD = _whole(q, "scores", "q", _ALONG_HEAD_DIM, setting)
    k_gKD = _whole(k, "scores", "k", _ALONG_HEAD_DIM, setting)
    v_gKD = _whole(v, "context", "v", _ALONG_SEQUENCE, setting)
    repeat = q.shape[2] // k.shape[2]
    o_hQD = q_hQD.new_empty(*q_hQD.shape[:2], v.shape[3])
    # Zeros: where a block leaves keys out, they are hidden from all its rows.
    shown_hQK = q.new_zeros(*q_hQD.shape[:2], k.shape[0]) if setting.show_probabilities else None
    dropout = _Dropout(setting, q.device)
    for block in score_blocks(q_hQD.shape[0], setting.mask, q.device):
        p_hQK = _softmax(q_hQD, k_gKD, block, setting, repeat).to(q.dtype)
        if shown_hQK is not None:
            shown_hQK[block.heads, block.rows, : block.keys] = p_hQK
        p_hQK = dropout.apply(p_hQK, dropout.draw(p_hQK))
        p_hQK = _part(p_hQK, "context", "p", _ALONG_KEYS, setting)
        o_hQD[block.heads, block.rows] = matmul(p_hQK, _seen(v_gKD, block, repeat))
    if setting.show_probabilities and shown_hQK is not None:
        setting.show_probabilities(shown_hQK.view(*q.shape[1:3], *shown_hQK.shape[1:]))
    return _from_heads(o_hQD, samples=q.shape[1])


def backward_pass(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, setting: Setting, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dq, dk, dv) in the shapes of q, k and v, from do [s_q, b, heads, d]; None where not `wanted`."""
    repeat, samples = q.shape[2] // k.shape[2], q.shape[1]
    operands = _WholeOperands.of(q, k, v, do, setting)
    scores = operands.q_scores
    dq_hQD = torch.empty_like(scores)
    dk, dv = (_KeyGradient(scores.new_zeros(scores.shape[0], *t.shape[1:])) for t in (operands.k_dq, operands.v_dp))
    dropout = _Dropout(setting, q.device)
    for block in score_blocks(scores.shape[0], setting.mask, q.device):
        p_hQK, ds_hQK = _probabilities_and_gradient(operands, block, setting, repeat, dropout)
        here = (block.heads, block.rows)
        if wanted[2]:
            dv.add(_part(p_hQK, "dv", "p", _ALONG_QUERIES, setting), operands.do_dv[here], block)
        if wanted[0]:
            ds = _part(ds_hQK, "dq", "ds", _ALONG_KEYS, setting)
            dq_hQD[here] = matmul(ds, _seen(operands.k_dq, block, repeat))
        if wanted[1]:
            dk.add(_part(ds_hQK, "dk", "ds", _ALONG_QUERIES, setting), operands.q_dk[here], block)
    return (
        _from_heads(dq_hQD.mul_(setting.softmax_scale), samples) if wanted[0] else None,
        _from_heads(dk.result_gKD(repeat, setting.softmax_scale), samples) if wanted[1] else None,
        _from_heads(dv.result_gKD(repeat), samples) if wanted[2] else None,
    )


@dataclass(frozen=True, kw_only=True)
class _WholeOperands:
    """What the backward pass holds whole, quantised for the GEMM that each name ends with."""

    q_scores: Tensor
    k_scores: Tensor
    do_dv: Tensor
    do_dp: Tensor
    v_dp: Tensor
    k_dq: Tensor
    q_dk: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, do: Tensor, setting: Setting) -> _WholeOperands:
        return cls(
            q_scores=_whole(q, "scores", "q", _ALONG_HEAD_DIM, setting),
            k_scores=_whole(k, "scores", "k", _ALONG_HEAD_DIM, setting),
            do_dv=_whole(do, "dv", "do", _ALONG_SEQUENCE, setting),
            do_dp=_whole(do, "dp", "do", _ALONG_HEAD_DIM, setting),
            v_dp=_whole(v, "dp", "v", _ALONG_HEAD_DIM, setting),
            k_dq=_whole(k, "dq", "k", _ALONG_SEQUENCE, setting),
            q_dk=_whole(q, "dk", "q", _ALONG_SEQUENCE, setting),
        )


class _KeyGradient:
    """dk or dv [h, K, D] of every query head: a product over all rows, whose blocks come one after the other."""

    def __init__(self, zeros_hKD: Tensor) -> None:
        self._total = zeros_hKD
        self._sum: Tensor | None = None

    def add(self, a_hQK: Tensor, b_hQD: Tensor, block: Block) -> None:
        """Add a^T b of this block's rows; the last block of a head rounds the sum to the compute dtype."""
        a_hKQ = a_hQK.transpose(1, 2)
        total_hKD = self._total[block.heads, : block.keys]
        if block.is_first and block.is_last:
            total_hKD.copy_(matmul(a_hKQ, b_hQD))
            return
        product = matmul_unrounded(a_hKQ, b_hQD)
        if block.is_first:
            self._sum = product.new_zeros(self._total[block.heads].shape)
        assert self._sum is not None
        self._sum[:, : block.keys] += product
        if block.is_last:
            self._total[block.heads] = self._sum.to(self._total.dtype)

    def result_gKD(self, repeat: int, scale: float = 1.0) -> Tensor:
        """The gradient of each KV head: that of its `repeat` query heads, scaled and summed in the compute dtype."""
        total = self._total.mul_(scale)
        return total.view(-1, repeat, *total.shape[1:]).sum(dim=1)


class _Dropout:
    """Masks drawn block by block from a generator of their own; a second one with the same seed draws them again."""

    def __init__(self, setting: Setting, device: torch.device) -> None:
        self._probability = setting.dropout
        self._generator: torch.Generator | None = None
        if setting.seed is not None:
            self._generator = torch.Generator(device=device)
            self._generator.manual_seed(setting.seed)

    def draw(self, like: Tensor) -> Tensor | None:
        """True where an element of the next block stays; None: no dropout."""
        if self._generator is None:
            return None
        return torch.rand(like.shape, generator=self._generator, device=like.device) >= self._probability

    def apply(self, x: Tensor, stays: Tensor | None) -> Tensor:
        """Scale up what stays, to keep the mean, and zero the rest; this is its own backward pass."""
        return x if stays is None else torch.where(stays, x / (1.0 - self._probability), 0.0)


def _softmax(q_hQD: Tensor, k_gKD: Tensor, block: Block, setting: Setting, repeat: int) -> Tensor:
    """Return p of a block, in float32 if `softmax_in_fp32` and in the compute dtype otherwise."""
    s_hQK = matmul(q_hQD[block.heads, block.rows], _seen(k_gKD, block, repeat).transpose(1, 2))
    if setting.softmax_in_fp32:
        s_hQK = _widened(s_hQK)
    s_hQK.mul_(setting.softmax_scale)
    hidden = setting.mask.hidden(block, s_hQK.device)
    if hidden is not None:
        s_hQK.masked_fill_(hidden, HIDDEN_SCORE)
    return torch.softmax(s_hQK, dim=-1)


def _probabilities_and_gradient(
    operands: _WholeOperands, block: Block, setting: Setting, repeat: int, dropout: _Dropout
) -> tuple[Tensor, Tensor]:
    """(p after dropout, ds) of a block, both in the compute dtype; ds is the gradient of the scaled scores."""
    dtype = operands.q_scores.dtype
    p_hQK = _softmax(operands.q_scores, operands.k_scores, block, setting, repeat)
    stays = dropout.draw(p_hQK)
    dp_hQK = matmul(operands.do_dp[block.heads, block.rows], _seen(operands.v_dp, block, repeat).transpose(1, 2))
    dp_hQK = _widened(dropout.apply(dp_hQK, stays))
    wide_p = _widened(p_hQK)
    ds_hQK = (dp_hQK - (wide_p * dp_hQK).sum(dim=-1, keepdim=True)).mul_(wide_p)
    hidden = setting.mask.hidden(block, ds_hQK.device)
    if hidden is not None:
        ds_hQK.masked_fill_(hidden, 0.0)
    return dropout.apply(p_hQK.to(dtype), stays), ds_hQK.to(dtype)


def _whole(t: Tensor, gemm: str, operand: str, axis: int, setting: Setting) -> Tensor:
    """A tensor [sequence, b, heads, D] as the quantised operand [b * heads, sequence, D]."""
    t_hSD = t.permute(1, 2, 0, 3).flatten(0, 1)
    return setting.quant.quantize(t_hSD, gemm, operand, axis=axis, reduce_amax=setting.reduce_amax)


def _part(t_hQK: Tensor, gemm: str, operand: str, axis: int, setting: Setting) -> Tensor:
    """A block of p or ds as a quantised operand; head by head where its largest magnitude matters."""
    if not setting.quant.needs_amax(gemm, operand):
        return setting.quant.quantize(t_hQK, gemm, operand, axis=axis)
    return torch.stack([setting.quant.quantize(t_QK, gemm, operand, axis=axis - 1) for t_QK in t_hQK])


def _seen(kv_gKD: Tensor, block: Block, repeat: int) -> Tensor:
    """The keys (or values) that a block sees, [heads, keys, D]: each KV head `repeat` times."""
    if repeat == 1:
        return kv_gKD[block.heads, : block.keys]
    group = torch.arange(block.heads.start, block.heads.stop, device=kv_gKD.device) // repeat
    return kv_gKD[group, : block.keys]


def _from_heads(t_hSD: Tensor, samples: int) -> Tensor:
    """[b * heads, sequence, D] as [sequence, b, heads, D]."""
    return t_hSD.view(samples, -1, *t_hSD.shape[1:]).permute(2, 0, 1, 3).contiguous()


def _widened(t: Tensor) -> Tensor:
    """16-bit tensors as float32, others as they are."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t
