"""Where each attention head looks, and how sharply: from the captured probabilities, or recomputed from q and k.

    p = softmax(softmax_scale q k^T), causal

The captured p is what the softmax of the run gave. The recomputed one comes from the high-precision operands, so it is
the attention before quantisation of its own GEMMs; where the capture does not tell the softmax scale, it is
1 / sqrt(head_dim). Of long sequences evenly spaced queries are taken, one head at a time, so that beyond the tensors
themselves memory is that of a few hundred rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
_NAMES = {"query": "query", "key": "key", "attention_probs": "probabilities"}  # captured -> field of an AttentionPair
_COORDINATES = ("iteration", "micro_batch", "sample_idx", "rank")
_LABELS = {"iteration": "iteration", "micro_batch": "micro-batch", "rank": "rank"}
_FIRST = [*_COORDINATES, "file", "offset"]

Floats = npt.NDArray[np.float32]
_HeadView = tuple[Floats, float, float, float]  # the map and the three numbers of a head, as in AttentionView


@dataclass(frozen=True, kw_only=True)
class AttentionPair:
    """One layer's q and k, and its probabilities where they were kept, of one micro-batch and rank.

    Attributes:
        quant_type: Of the run.
        layer: From 0.
        query: Where q lies; None: it was not kept.
        key: Where k lies; None: it was not kept.
        where: The micro-batch and rank in words.
        probabilities: Where p lies; None: it was not kept.
        softmax_scale: What scores are multiplied by; None: 1 / sqrt(head_dim).
    """

    quant_type: str
    layer: int
    query: Location | None
    key: Location | None
    where: str
    probabilities: Location | None = None
    softmax_scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionView:
    """What one layer's heads do.

    Attributes:
        pair: Where q and k came from.
        maps: [heads, queries, keys], at most MAP_SIZE each, the largest p of what falls into a cell.
        entropy_bits: [heads]: mean over queries of -sum p log2 p.
        first_token: [heads]: mean share of p on the first key, over all queries but the first.
        largest_score: [heads]: largest scaled score that is not masked, of the sampled queries; NaN without q and k.
        queries, keys: How many there are; those of the maps are evenly spaced among them.
        recomputed: Whether p comes from q and k.
    """

    pair: AttentionPair
    queries: int
    keys: int
    maps: Floats
    entropy_bits: Floats
    first_token: Floats
    largest_score: Floats
    recomputed: bool = True


def attention_pairs(summary: pandas.DataFrame) -> list[AttentionPair]:
    """The first micro-batch's q and k, or p, of every layer that has them, type by type."""
    rows = summary[(summary["layer_type"] == "attention") & (summary["operation"] == "forward")]
    rows = rows[rows["layer_idx"].notna() & rows["tensor_name"].isin(_NAMES) & rows["file"].notna()]
    rows = rows.sort_values(_FIRST)
    pairs = []
    for (quant_type, layer), group in rows.groupby(["quant_type", "layer_idx"]):
        group = _of_one_micro_batch(group)
        found = {row["tensor_name"]: row for row in reversed(group.to_dict("records"))}  # the first of each name stays
        if not ({"query", "key"} <= set(found) or "attention_probs" in found):
            continue
        one = next(iter(found.values()))
        scale = one.get("softmax_scale")
        pairs.append(
            AttentionPair(
                quant_type=quant_type,
                layer=int(layer),
                where=_where(one),
                softmax_scale=scale if scale == scale else None,
                **{field: location_of(found[name]) if name in found else None for name, field in _NAMES.items()},
            )
        )
    return pairs


def view_attention(pair: AttentionPair) -> AttentionView | None:
    """One layer's attention; None when files can not be read or their shapes are not those of q and k, or of p."""
    try:
        query, key, p = (None if at is None else at.load() for at in (pair.query, pair.key, pair.probabilities))
    except CaptureError:  # the scan has listed it
        return None
    scored = captured = None
    size = (0, 0)
    if query is not None and key is not None and _are_q_and_k(query, key):
        size = (len(query), len(key))
        scored = [_score_head(query, key, head, pair.softmax_scale) for head in range(query.shape[2])]
    if p is not None and p.dim() == _RANK_4 and 0 not in p.shape:
        size = (p.shape[2], p.shape[3])
        captured = [_captured_head(p, head) for head in range(p.shape[1])]
    heads = captured or scored
    if heads is None:
        return None
    maps, entropy, first, largest = (np.stack(parts).astype(np.float32) for parts in zip(*heads, strict=True))
    if captured is not None and scored is not None and len(scored) == len(captured):
        largest = np.array([score for *_, score in scored], dtype=np.float32)
    return AttentionView(
        pair=pair,
        queries=size[0],
        keys=size[1],
        maps=maps,
        entropy_bits=entropy,
        first_token=first,
        largest_score=largest,
        recomputed=captured is None,
    )


def probabilities(
    query: Tensor, key: Tensor, positions: Tensor, softmax_scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """One head's causal attention.

    Args:
        query: [queries, head_dim], float32: the rows at `positions`.
        key: [keys, head_dim], float32.
        positions: [queries]: the place of each query among the keys.
        softmax_scale: What scores are multiplied by; None: 1 / sqrt(head_dim).

    Returns:
        p and the scaled scores, [queries, keys] each; masked scores are -inf.
    """
    scores = query @ key.T * (query.shape[1] ** -0.5 if softmax_scale is None else softmax_scale)
    scores = scores.masked_fill(torch.arange(len(key)) > positions[:, None], -math.inf)
    return torch.softmax(scores, dim=1), scores


def _of_one_micro_batch(rows: pandas.DataFrame) -> pandas.DataFrame:
    """The rows, sorted, that agree with the first of them; what it does not know none of them may."""
    for column in _COORDINATES:
        first = rows[column].iloc[0]
        rows = rows[(rows[column] == first) | (rows[column].isna() & (first != first))]
    return rows


def _are_q_and_k(query: Tensor, key: Tensor) -> bool:
    fits = query.dim() == key.dim() == _RANK_4 and query.shape[3] == key.shape[3]
    return fits and 0 not in (*query.shape, *key.shape) and query.shape[2] % key.shape[2] == 0


def _sampled(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Evenly spaced queries, and their places among the keys: where they are fewer than those, they are the last."""
    rows = torch.linspace(0, queries - 1, min(queries, _QUERIES)).round().long()
    return rows, rows + keys - queries


def _score_head(query: Tensor, key: Tensor, head: int, softmax_scale: float | None) -> _HeadView:
    """Of q [s, b, heads, d] and k [s, b, groups, d]."""
    rows, positions = _sampled(len(query), len(key))
    group = head * key.shape[2] // query.shape[2]
    p, scores = probabilities(query[rows, 0, head].float(), key[:, 0, group].float(), positions, softmax_scale)
    finite = scores[torch.isfinite(scores)]
    return _view_head(p, positions, float(finite.abs().max()) if len(finite) else math.nan)


def _captured_head(p: Tensor, head: int) -> _HeadView:
    """Of p [b, heads, queries, keys]."""
    rows, positions = _sampled(*p.shape[2:])
    return _view_head(p[0, head, rows].float(), positions, math.nan)


def _view_head(p: Tensor, positions: Tensor, largest_score: float) -> _HeadView:
    """The map, the entropy in bits and the share of the first token of p [sampled queries, keys]."""
    entropy = -(p * torch.log2(p.clamp_min(torch.finfo(p.dtype).tiny))).sum(dim=1).mean()
    later = p[positions > 0, 0]
    size = (min(MAP_SIZE, p.shape[0]), min(MAP_SIZE, p.shape[1]))
    pooled: Floats = torch.nn.functional.adaptive_max_pool2d(p[None], size)[0].numpy()
    return pooled, float(entropy), float(later.mean()) if len(later) else 1.0, largest_score


def _where(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{label} {int(row[column])}" for column, label in _LABELS.items() if row[column] == row[column])
