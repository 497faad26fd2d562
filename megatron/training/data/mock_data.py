"""Made-up data: megatron-core's, which before 0.16 has tokens that a small vocabulary lacks."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron.core.datasets.gpt_dataset import MockGPTDataset, MockGPTLowLevelDataset


class _Documents(MockGPTLowLevelDataset):
    """Documents that count up from 1, each token modulo the vocabulary, as since 0.16."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._tokens = tokenizer.vocab_size

    def __getitem__(self, index: int) -> np.ndarray:
        return super().__getitem__(index) % self._tokens


class MockData(MockGPTDataset):
    """megatron-core's mock data, the same on every version."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> MockGPTLowLevelDataset:
        """The documents; there is no path."""
        return _Documents(config.tokenizer)
