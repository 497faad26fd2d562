"""Checksums: of the bytes that NumPy sees, by the libraries that define the algorithms."""

import hashlib

import numpy as np
import pytest
import torch
import xxhash

from megatron.quantscope.capture import CaptureError
from megatron.quantscope.capture.hashing import bytes_of, checksum, digest_of
from tests.quantscope.capture.conftest import ODD_TENSORS

# Of the XXH3 specification's own test suite: 128 bits of the empty input and of one zero byte's, seed 0.
PUBLISHED = {b"": "99aa06d3014798d86001c324468d497f"}


def numpy_bytes(tensor):
    """The row-major bytes by way of NumPy, element by element where it has no such dtype."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    words = {1: torch.uint8, 2: torch.int16}
    if str(tensor.dtype).startswith(("torch.float8", "torch.bfloat16")):
        tensor = tensor.contiguous().view(words[tensor.element_size()])
    return np.ascontiguousarray(tensor.numpy()).tobytes()


@pytest.mark.parametrize("make", ODD_TENSORS.values(), ids=ODD_TENSORS.keys())
def test_checksum_is_the_hash_of_the_bytes(make):
    tensor = make().detach().resolve_conj().resolve_neg()
    content = numpy_bytes(tensor)
    assert bytes(bytes_of(tensor)) == content
    assert checksum(tensor) == "xxh3_128:" + xxhash.xxh3_128(content).hexdigest()
    assert checksum(tensor, "sha256") == "sha256:" + hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize(("content", "digest"), PUBLISHED.items())
def test_published_values(content, digest):
    assert digest_of(content) == digest


def test_a_contiguous_tensor_is_not_copied():
    tensor = torch.zeros(8)
    view = bytes_of(tensor)
    tensor[0] = 1.0
    assert bytes(view[:4]) == np.float32(1).tobytes()


def test_one_bit_shows():
    tensor = torch.zeros(1000)
    before = checksum(tensor)
    tensor[999] = -0.0
    assert checksum(tensor) != before


def test_shape_and_dtype_are_not_hashed():
    assert checksum(torch.zeros(2, 6)) == checksum(torch.zeros(3, 8, dtype=torch.bfloat16))


def test_an_unknown_algorithm_is_named():
    with pytest.raises(CaptureError, match="checksum algorithm 'md5' is not known: there are xxh3_128, sha256"):
        digest_of(b"", "md5")
