"""Blocks of an attention's score matrix: how it is cut, and which scores of a block are hidden.

The score matrix of b x heads x s_q x s_k is never whole. A block has some query heads and some rows (queries), and all
the keys that these rows may see, so the softmax of a row is complete within one block. Rows are cut first and at
multiples of 32, the largest block of any format: a scale block along the queries then never straddles two blocks, and
one along the keys always starts at key 0, so block-scaled operands come out as those of the whole matrix. Heads are
grouped only where all their rows fit, so a row's block does not depend on how many heads there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CPU_BLOCK_ELEMENTS = 1 << 20
"""Scores in a block: 4 MB in float32. Larger ones leave the cache (2.5 times slower at 2,048 tokens)."""
DEVICE_BLOCK_ELEMENTS = 1 << 24
"""The same on a GPU, where launches cost more: 64 MB in float32."""
ROW_MULTIPLE = 32


@dataclass(frozen=True, kw_only=True)
class Block:
    """A piece of the score matrix.

    Attributes:
        heads: Range of the flattened (sample, query head) index.
        rows: Range of queries.
        keys: Keys 0 to this one (exclusive) are computed; the others are hidden from all rows.
        is_first: These are the first rows of their heads.
        is_last: These are the last rows of their heads.
    """

    heads: slice
    rows: slice
    keys: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class ScoreMask:
    """Which scores are hidden, for any block.

    Attributes:
        s_q: Queries.
        s_k: Keys.
        heads: Query heads of one sample.
        causal: Hide keys whose position is larger than the query's.
        mask: Bool, True hides, broadcastable to [b, 1, s_q, s_k]; None: hides nothing.
        query_positions: Int [s_q]; None: 0, 1, 2, ...
        key_positions: Int [s_k]; None: 0, 1, 2, ...
    """

    s_q: int
    s_k: int
    heads: int
    causal: bool
    mask: Tensor | None
    query_positions: Tensor | None
    key_positions: Tensor | None

    def __post_init__(self) -> None:
        unplaced = self.query_positions is None or self.key_positions is None
        if self.causal and self.s_q != self.s_k and unplaced:
            raise ValueError(
                f"causal attention of {self.s_q} queries and {self.s_k} keys needs query_positions and key_positions"
            )
        for name, positions, length in (
            ("query_positions", self.query_positions, self.s_q),
            ("key_positions", self.key_positions, self.s_k),
        ):
            if positions is not None and positions.shape != (length,):
                raise ValueError(f"{name} has shape {list(positions.shape)}; it must be [{length}]")
        if self.mask is not None and self.mask.dtype != torch.bool:
            raise ValueError(f"the mask is {self.mask.dtype}; it must be torch.bool, True where a score is hidden")

    def keys_seen(self, rows: int) -> int:
        """How many keys the first `rows` queries need, rounded up to `ROW_MULTIPLE`.

        All of them, unless the mask is the plain causal one: a row that an explicit mask hides wholly attends to all
        keys alike, as in megatron-core.
        """
        plain = self.causal and self.mask is None and self.query_positions is None and self.key_positions is None
        return min(self.s_k, _round_up(rows)) if plain else self.s_k

    def hidden(self, block: Block, device: torch.device) -> Tensor | None:
        """True where a score is hidden, [heads of the block or 1, rows, keys]; None: nowhere."""
        causal = self._causal(block, device) if self.causal else None
        if self.mask is None:
            return causal
        mask = self.mask.expand(*self.mask.shape[:-2], self.s_q, self.s_k)[..., block.rows, : block.keys]
        mask = mask.reshape(-1, *mask.shape[-2:])
        if mask.shape[0] > 1:
            mask = mask[torch.arange(block.heads.start, block.heads.stop, device=mask.device) // self.heads]
        return mask if causal is None else mask | causal

    def _causal(self, block: Block, device: torch.device) -> Tensor:
        query = _positions(self.query_positions, self.s_q, device)[block.rows]
        key = _positions(self.key_positions, self.s_k, device)[: block.keys]
        return (key > query[:, None])[None]


def score_blocks(heads: int, mask: ScoreMask, device: torch.device) -> Iterator[Block]:
    """The blocks of all `heads` (flattened over samples): one group of heads after the other, each row by row."""
    limit = CPU_BLOCK_ELEMENTS if device.type == "cpu" else DEVICE_BLOCK_ELEMENTS
    s_q, s_k = max(1, mask.s_q), max(1, mask.s_k)
    rows = min(s_q, max(ROW_MULTIPLE, limit // s_k // ROW_MULTIPLE * ROW_MULTIPLE))
    group = max(1, limit // (s_q * s_k)) if rows == s_q else 1
    for head in range(0, heads, group):
        for row in range(0, mask.s_q, rows):
            end = min(row + rows, mask.s_q)
            yield Block(
                heads=slice(head, min(head + group, heads)),
                rows=slice(row, end),
                keys=mask.keys_seen(end),
                is_first=row == 0,
                is_last=end == mask.s_q,
            )


def _positions(given: Tensor | None, length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device) if given is None else given.to(device)


def _round_up(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
