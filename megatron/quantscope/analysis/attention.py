"""Attention recomputed from the captured q and k: where each head looks, and how sharply.

    p = softmax(q k^T / sqrt(head_dim)), causal

from the high-precision operands, so it is the attention before quantisation of its own GEMMs. Of long sequences evenly
spaced queries are taken, one head at a time, so that memory is that of a few hundred rows however long they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.quantscope.analysis.tables import location_of
from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.location import Location

if TYPE_CHECKING:
    import pandas

MAP_SIZE = 128
_QUERIES = 256
_RANK_4 = 4
_FIRST = ["iteration", "micro_batch", "sample_idx", "rank", "file", "offset"]

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class AttentionPair:
    """One layer's q and k, of one micro-batch and rank."""

    quant_type: str
    layer: int
    query: Location
    key: Location
    where: str


@dataclass(frozen=True, kw_only=True)
class AttentionView:
    """What one layer's heads do.

    Attributes:
        pair: Where q and k came from.
        maps: [heads, queries, keys], at most MAP_SIZE each, the largest p of what falls into a cell.
        entropy_bits: [heads]: mean over queries of -sum p log2 p.
        first_token: [heads]: mean share of p on the first key, over all queries but the first.
        largest_score: [heads]: largest scaled score |q k^T / sqrt(d)| that is not masked.
    """

    pair: AttentionPair
    maps: Floats
    entropy_bits: Floats
    first_token: Floats
    largest_score: Floats


def attention_pairs(summary: pandas.DataFrame) -> list[AttentionPair]:
    """The first micro-batch's q and k of every layer that has both, type by type."""
    rows = summary[(summary["layer_type"] == "attention") & (summary["operation"] == "forward")]
    rows = rows[rows["layer_idx"].notna()].sort_values(_FIRST)
    pairs = []
    for (quant_type, layer), group in rows.groupby(["quant_type", "layer_idx"]):
        query = group[group["tensor_name"] == "query"].head(1)
        if query.empty:
            continue
        key = group[group["tensor_name"] == "key"]
        for column in ("iteration", "micro_batch", "sample_idx", "rank"):
            same = key[column] == query[column].iloc[0]
            key = key[same | (key[column].isna() & query[column].isna().iloc[0])]
        if not key.empty:
            q_and_k = {"query": location_of(query.iloc[0]), "key": location_of(key.iloc[0])}
            pairs.append(AttentionPair(quant_type=quant_type, layer=int(layer), where=_where(query), **q_and_k))
    return pairs


def view_attention(pair: AttentionPair) -> AttentionView | None:
    """Recompute one layer's attention; None when the files can not be read or their shapes are not q's and k's."""
    try:
        query, key = pair.query.load(), pair.key.load()
    except CaptureError:  # the scan has listed it
        return None
    shapes_fit = query.dim() == key.dim() == _RANK_4 and query.shape[3] == key.shape[3]
    if not shapes_fit or query.shape[2] % key.shape[2] or 0 in (*query.shape, *key.shape):
        return None
    heads = [
        _view_head(query[:, 0, head].float(), key[:, 0, head * key.shape[2] // query.shape[2]].float())
        for head in range(query.shape[2])
    ]
    maps, entropy, first, largest = (np.stack(parts).astype(np.float32) for parts in zip(*heads, strict=True))
    return AttentionView(pair=pair, maps=maps, entropy_bits=entropy, first_token=first, largest_score=largest)


def probabilities(query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """One head's causal attention.

    Args:
        query: [queries, head_dim], float32: the rows at `positions`.
        key: [keys, head_dim], float32.
        positions: [queries]: the place of each query among the keys.

    Returns:
        p and the scaled scores, [queries, keys] each; masked scores are -inf.
    """
    scores = query @ key.T / math.sqrt(query.shape[1])
    scores = scores.masked_fill(torch.arange(len(key)) > positions[:, None], -math.inf)
    return torch.softmax(scores, dim=1), scores


def _view_head(query: Tensor, key: Tensor) -> tuple[Floats, float, float, float]:
    count = min(len(query), _QUERIES)
    rows = torch.linspace(0, len(query) - 1, count).round().long()
    positions = rows + len(key) - len(query)  # where fewer queries than keys are there, they are the last
    p, scores = probabilities(query[rows], key, positions)
    entropy = -(p * torch.log2(p.clamp_min(torch.finfo(p.dtype).tiny))).sum(dim=1).mean()
    later = p[positions > 0, 0]
    size = (min(MAP_SIZE, count), min(MAP_SIZE, len(key)))
    pooled = torch.nn.functional.adaptive_max_pool2d(p[None], size)[0].numpy()
    finite = scores[torch.isfinite(scores)]
    largest = finite.abs().max() if len(finite) else math.nan
    return pooled, float(entropy), float(later.mean()) if len(later) else 1.0, float(largest)


def _where(row: pandas.DataFrame) -> str:
    parts = [f"{label} {int(row[column].iloc[0])}" for column, label in _LABELS.items() if row[column].notna().iloc[0]]
    return ", ".join(parts)


_LABELS = {"iteration": "iteration", "micro_batch": "micro-batch", "rank": "rank"}
