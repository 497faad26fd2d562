"""Dealing a sequence over ranks and gathering it again, for any number of ranks, without any process but this one."""

import pytest
import torch

from megatron.core import context_parallel
from megatron.core.context_parallel import gather_sequence, positions_of, share_of

LENGTH = 48


class Group:
    """Stands for a process group."""

    def __init__(self, rank, ranks):
        self._rank, self._ranks = rank, ranks

    def rank(self):
        return self._rank

    def size(self):
        return self._ranks


def owner(position, ranks):
    """The rank that has a token: chunks are given out upwards, then downwards."""
    chunk = position // (LENGTH // (2 * ranks))
    return chunk if chunk < ranks else 2 * ranks - 1 - chunk


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_token_has_one_rank_and_ranks_have_equal_work(ranks):
    positions = [positions_of(Group(rank, ranks), LENGTH // ranks, torch.device("cpu")) for rank in range(ranks)]
    for rank, held in enumerate(positions):
        assert held.tolist() == [position for position in range(LENGTH) if owner(position, ranks) == rank]
    seen = {int((held + 1).sum()) for held in positions}  # keys that the rank's queries see
    assert seen == {LENGTH * (LENGTH + 1) // 2 // ranks}


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_any_dimension_can_be_the_sequence(dim):
    whole = torch.randn(LENGTH, LENGTH, LENGTH)
    share = share_of(whole, dim=dim, rank=1, ranks=2)
    assert torch.equal(share, whole.index_select(dim, positions_of(Group(1, 2), LENGTH // 2, whole.device)))
    assert share.is_contiguous()


@pytest.mark.parametrize("ranks", [2, 3])
def test_gathering_gives_the_sequence_in_its_order(ranks, monkeypatch):
    whole = torch.randn(LENGTH, 2, 3, dtype=torch.float64)
    shares = [share_of(whole, dim=0, rank=rank, ranks=ranks).requires_grad_() for rank in range(ranks)]
    monkeypatch.setattr(
        context_parallel, "gather_from_sequence_parallel_region", lambda share, group: torch.cat(shares)
    )
    gathered = gather_sequence(shares[0], Group(0, ranks))
    assert torch.equal(gathered, whole)
    weights = torch.randn_like(whole)
    (gathered * weights).sum().backward()
    for rank, share in enumerate(shares):
        assert torch.equal(share.grad, share_of(weights, dim=0, rank=rank, ranks=ranks))
