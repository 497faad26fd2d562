"""Copies: independent of the original, dense, and hashed by the bytes that NumPy sees."""

import hashlib

import numpy as np
import pytest
import torch

from megatron.quantscope.capture import CaptureError
from megatron.quantscope.capture.snapshot import checksum, size_of, snapshot

MAKE = {
    "contiguous": lambda: torch.arange(24.0).reshape(2, 3, 4),
    "transposed": lambda: torch.arange(24.0).reshape(4, 6).t(),
    "strided": lambda: torch.arange(24.0)[::3],
    "expanded": lambda: torch.arange(3.0)[:, None].expand(3, 1000),
    "view of a large storage": lambda: torch.zeros(100_000)[10:20],
    "0-dim": lambda: torch.tensor(3.5),
    "empty": lambda: torch.zeros(3, 0, 2),
    "channels last": lambda: torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last),
    "nan": lambda: torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "part of a graph": lambda: torch.ones(3, requires_grad=True) * 2,
    "bool": lambda: torch.tensor([True, False]),
    "int64": lambda: torch.arange(5),
    "uint8": lambda: torch.arange(5, dtype=torch.uint8),
    "bfloat16": lambda: torch.randn(7).bfloat16(),
    "float16": lambda: torch.randn(7).half(),
    "float8": lambda: torch.randn(7).to(torch.float8_e4m3fn),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(3, dtype=torch.complex64).conj(),
}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())
def test_copies(make):
    tensor = make()
    copy = snapshot(tensor)
    assert type(copy) is torch.Tensor
    assert (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
    assert torch.equal(bits(copy), bits(tensor.detach().resolve_conj()))
    assert copy.is_contiguous()
    assert not copy.requires_grad
    assert copy.untyped_storage().nbytes() == size_of(tensor)  # a file of it holds nothing else
    assert copy.numel() == 0 or copy.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())
def test_checksum_is_the_hash_of_the_bytes(make):
    copy = snapshot(make())
    wide = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}  # dtypes that NumPy does not have
    array = (copy.view(wide[copy.dtype]) if copy.dtype in wide else copy).numpy()
    assert checksum(copy) == "sha256:" + hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [(torch.eye(3).to_sparse(), "torch.sparse_coo"), (torch.empty(3, device="meta"), "meta")],
)
def test_tensors_that_are_not_dense_are_refused(tensor, kind):
    with pytest.raises(CaptureError, match=f"a {kind} tensor can not be kept"):
        snapshot(tensor)
