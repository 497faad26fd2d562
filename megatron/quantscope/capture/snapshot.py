"""A copy of a tensor that nothing else can change, and the fingerprint of its content.

The copy is made when the tensor is shown, since training may free it or write over it the moment after. It is dense,
contiguous and on the CPU, whatever the original was: `torch.save` would write the whole storage behind a view.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from megatron.quantscope.capture.errors import CaptureError

if TYPE_CHECKING:
    import torch

HASH = "sha256"


def size_of(tensor: torch.Tensor) -> int:
    """Bytes that a copy of `tensor` takes."""
    return tensor.numel() * tensor.element_size()


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """A detached, contiguous copy in host memory, of the same shape and dtype.

    Raises:
        CaptureError: for a tensor that is not dense.
    """
    import torch

    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else str(tensor.layout)
        raise CaptureError(f"a {kind} tensor can not be kept: only dense tensors can")
    copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copy.resolve_conj().resolve_neg()  # lazy bits that a file would lose


def checksum(tensor: torch.Tensor) -> str:
    """`sha256:` and the hash of the elements' bytes in row-major order, little-endian as in memory.

    Shape and dtype are not hashed; they stand beside the checksum wherever it is kept. Anyone can verify a file:
    `sha256(torch.load(f)["tensor"].reshape(-1).view(torch.uint8).numpy())`.
    """
    import torch

    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{HASH}:{hashlib.new(HASH, content.data).hexdigest()}"
