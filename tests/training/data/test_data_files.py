"""PREFIX.bin and PREFIX.idx as megatron-core writes them, and as they should not be."""

import numpy as np
import pytest
import torch

from megatron.training.data.data_files import sequence_lengths, token_dtype, write_index
from megatron.training.failure import UsageError

LENGTHS = [5, 1, 0, 300]


@pytest.fixture
def prefix(tmp_path):
    """A dataset of megatron-core's own builder: four documents, uint16."""
    return str(write(tmp_path / "corpus", np.uint16))


def write(prefix, dtype, documents=LENGTHS):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for length in documents:
        builder.add_document(torch.arange(length) % 100, [length])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_the_index_is_that_of_megatron_core(tmp_path, dtype):
    write(tmp_path / "theirs", dtype)
    write_index(tmp_path / "ours.idx", np.array(LENGTHS, np.int64), np.dtype(dtype))
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()


@pytest.mark.parametrize("vocabulary", [256, 65_499, 65_500, 65_536, 128_256])
def test_tokens_are_as_wide_as_megatron_core_has_them(vocabulary):
    from megatron.core.datasets.indexed_dataset import DType

    assert token_dtype(vocabulary) == np.dtype(DType.optimal_dtype(vocabulary))


def cut(path, size):
    with open(path, "r+b") as stream:
        stream.truncate(size)


def refusal(prefix):
    with pytest.raises(UsageError) as caught:
        sequence_lengths(prefix)
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    "dtype",
    [np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16],
    ids=lambda d: d.__name__,
)
def test_every_dtype_that_upstream_writes(tmp_path, dtype):
    lengths = sequence_lengths(str(write(tmp_path / "corpus", dtype)))
    assert (lengths.tolist(), lengths.dtype) == (LENGTHS, np.int32)


def test_no_sequences(tmp_path):
    assert sequence_lengths(str(write(tmp_path / "empty", np.int32, []))).tolist() == []


@pytest.mark.parametrize("lost", [1, 2, 100, 612])
def test_truncated_tokens(prefix, lost):
    whole = 2 * sum(LENGTHS)
    cut(f"{prefix}.bin", whole - lost)
    assert refusal(prefix) == (
        f"{prefix}.bin has {whole - lost} bytes, its index says {whole}: it is incomplete; make the data again"
    )


@pytest.mark.parametrize("kept", [34, 50, 100])
def test_truncated_index(prefix, kept):
    whole = 34 + 4 * (4 + 8) + 5 * 8
    cut(f"{prefix}.idx", kept)
    assert refusal(prefix).startswith(f"{prefix}.idx has {kept} bytes, its index says {whole}: it is incomplete")


@pytest.mark.parametrize("kept", [0, 1, 33])
def test_index_without_a_header(prefix, kept):
    cut(f"{prefix}.idx", kept)
    assert refusal(prefix) == f"{prefix}.idx is not the index of a Megatron dataset: it has {kept} bytes"


@pytest.mark.parametrize(("place", "content"), [(0, b"PK\x03\x04notours"), (9, b"\x02"), (17, b"\x00"), (17, b"\x63")])
def test_foreign_index(prefix, place, content):
    with open(f"{prefix}.idx", "r+b") as stream:
        stream.seek(place)
        stream.write(content)
    assert refusal(prefix).startswith(f"{prefix}.idx is not the index of a Megatron dataset: its first bytes are ")


def test_tokens_of_another_index(prefix, tmp_path):
    write(tmp_path / "other", np.uint16, [7])
    (tmp_path / "other.bin").replace(f"{prefix}.bin")
    assert refusal(prefix).startswith(f"{prefix}.bin has 14 bytes, its index says 612")
