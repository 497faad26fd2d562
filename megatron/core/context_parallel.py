"""How a sequence is dealt over the ranks of context parallelism, and gathered again.

Under a causal mask the last token sees all keys and the first only one, so ranks that took equal pieces in order would
have unequal work. A sequence is cut into 2 n chunks instead, and rank r of n takes one early and one late chunk:

    rank r: chunks r and 2 n - 1 - r            2 ranks, chunks 0 1 2 3: rank 0 has 0 3, rank 1 has 1 2

This is Megatron's order too. Gathered tensors are put back into the order of the sequence, although attention does not
need that: blocks of a format along the keys are then cut where one rank would cut them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

CHUNKS_A_RANK = 2


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The two chunks, of `CHUNKS_A_RANK` x `ranks`, that a rank has."""
    return rank, CHUNKS_A_RANK * ranks - 1 - rank


def share_of(tensor: Tensor, *, dim: int, rank: int, ranks: int) -> Tensor:
    """The part of `tensor` that a rank has; `dim`, the sequence, is a multiple of `CHUNKS_A_RANK` x `ranks` long."""
    chunks = tensor.chunk(CHUNKS_A_RANK * ranks, dim)
    return torch.cat([chunks[chunk] for chunk in chunks_of(rank, ranks)], dim)


def positions_of(group: ProcessGroup, length: int, device: torch.device) -> Tensor:
    """Places in the whole sequence of the `length` tokens that this rank of `group` has, int64 [length]."""
    whole = torch.arange(length * group.size(), device=device)
    return share_of(whole, dim=0, rank=group.rank(), ranks=group.size())


def gather_sequence(share: Tensor, group: ProcessGroup) -> Tensor:
    """The whole tensor [s, ...], in the order of the sequence, from the shares [s / n, ...] of the n ranks of `group`.

    Its gradient is summed over the ranks, and each gets the part it gave.
    """
    ranks = group.size()
    gathered = gather_from_sequence_parallel_region(share, group=group).chunk(CHUNKS_A_RANK * ranks)
    held = [chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks)]
    return torch.cat([gathered[held.index(chunk)] for chunk in range(len(held))])
