"""Which samples a data parallel rank reads, in which order.

The stream of samples 0, 1, 2, ... is cut into global micro-batches of micro-batch size x data parallel size; each rank
takes its share of each. So a sample's index is its place in the stream: the same for any data parallel size, and kept
over a resume, which starts the stream at the samples already consumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SequentialSampler:
    """The samples of one rank, a list for each micro-batch; an incomplete last micro-batch is left out.

    Attributes:
        total: Samples in the stream.
        consumed: Samples of it that were read before, on all ranks together.
        micro_batch_size: Samples a rank takes at once.
        rank: The data parallel rank.
        ranks: The data parallel size.
    """

    total: int
    consumed: int
    micro_batch_size: int
    rank: int
    ranks: int

    def __len__(self) -> int:
        return max(0, self.total - self.consumed) // (self.micro_batch_size * self.ranks)

    def __iter__(self) -> Iterator[list[int]]:
        for micro_batch in range(len(self)):
            yield self.sample_indices(micro_batch)

    def sample_indices(self, micro_batch: int) -> list[int]:
        """The global indices of this rank's samples in the micro-batch of that number, counted from this start."""
        first = self.consumed + (micro_batch * self.ranks + self.rank) * self.micro_batch_size
        return list(range(first, first + self.micro_batch_size))
