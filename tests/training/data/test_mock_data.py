"""Mock data is the same on every supported megatron-core."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron.training.data.mock_data import MockData

VOCABULARY = 100


@pytest.fixture(scope="module")
def documents():
    tokenizer = SimpleNamespace(vocab_size=VOCABULARY, eod=VOCABULARY - 1)
    return MockData.build_low_level_dataset(None, SimpleNamespace(tokenizer=tokenizer))


@pytest.mark.parametrize("index", [0, 1, 99_999])
def test_a_document_counts_up_modulo_the_vocabulary_and_ends(documents, index):
    length = documents.sequence_lengths[index]
    expected = [*((np.arange(length - 1) + 1) % VOCABULARY), VOCABULARY - 1]
    np.testing.assert_array_equal(documents[index], expected)
    np.testing.assert_array_equal(documents.get(index, 1, 5), expected[1:6])
