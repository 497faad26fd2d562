"""Which documents of the data a sample is made of.

A dataset's sample is a run of tokens over documents in a shuffled order; megatron-core keeps both orders as index
arrays, so finding a sample's documents reads a few numbers and no token. A document's number is its place in the
indexed file (the order in which the data was written). The parts of a blend are numbered one after the other, in the
order of the command line; a file that is named twice has its numbers once. The documents of mock data are those that
megatron-core makes up.
"""

from __future__ import annotations

from typing import Any

from megatron.core.datasets.blended_dataset import BlendedDataset


class Documents:
    """The documents of each sample of `samples`, a GPTDataset or a blend of them."""

    def __init__(self, samples: Any) -> None:
        self._blend = samples if isinstance(samples, BlendedDataset) else None
        self._parts = samples.datasets if self._blend is not None else [samples]
        self._first: dict[str | None, int] = {}  # path -> number of its first document
        total = 0
        for part in self._parts:
            if part.dataset_path not in self._first:
                self._first[part.dataset_path] = total
                total += len(part.dataset.sequence_lengths)

    def of(self, index: int) -> tuple[int, ...]:
        """The documents of a sample, in the order of its tokens; the last may give nothing but the last label."""
        part = self._parts[0]
        if self._blend is not None:
            part, index = self._parts[self._blend.dataset_index[index]], self._blend.dataset_sample_index[index]
        place = part.shuffle_index[index]
        first, last = part.sample_index[place, 0], part.sample_index[place + 1, 0]
        return tuple((part.document_index[first : last + 1] + self._first[part.dataset_path]).tolist())
