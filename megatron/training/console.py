"""What the trainer prints: every line once, whatever the number of ranks."""

from __future__ import annotations

import torch.distributed as dist


def print_rank_0(line: str) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def print_rank_last(line: str) -> None:
    """Print on the last rank: the one that holds the loss under pipeline parallelism, as in Megatron-LM."""
    if dist.get_rank() == dist.get_world_size() - 1:
        print(line, flush=True)
