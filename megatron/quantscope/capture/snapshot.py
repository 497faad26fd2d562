"""A copy of a tensor that nothing else can change, made when the tensor is shown.

Training may free the tensor or write over it the moment after, so the copy is taken at once. It is dense, contiguous
and in host memory that the arena lends, whatever the original was: a file would else hold the whole storage behind a
view.

A CUDA tensor is cloned on the stream that computes it, which keeps the order with whatever writes over it next and
takes as long as reading it from HBM; the clone then goes to pinned memory on a stream of its own. No thread waits for
the device: the writer asks the copy's event before it looks at the bytes. The clones in flight take no more device
memory than the arena has host memory, since their room there is reserved first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.quantscope.capture.arena import HostArena, Lease
from megatron.quantscope.capture.errors import CaptureError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A tensor in leased memory.

    Attributes:
        tensor: The copy; contiguous, on the CPU.
        lease: Its memory, to be given back when the copy is done with.
        wait: Returns when the bytes are there; None: they are.
    """

    tensor: torch.Tensor
    lease: Lease
    wait: Callable[[], None] | None = None


class Snapshots:
    """Makes copies of tensors of any device; belongs to one thread."""

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def take(self, tensor: torch.Tensor) -> Copy:
        """A detached copy of `tensor`, of its shape and dtype; waits for room, never for a device.

        Raises:
            CaptureError: for a tensor that is not dense.
        """
        source = tensor.detach() if tensor.requires_grad else tensor
        check_dense(source)
        if source.is_conj() or source.is_neg():
            source = source.resolve_conj().resolve_neg()  # lazy bits that a file would lose
        lease = self._arena.take(size_of(source), pinned=source.is_cuda)
        try:
            target = _tensor_in(lease, source)
            if source.is_cuda:
                return Copy(tensor=target, lease=lease, wait=self._copy_from_device(source, target))
            target.copy_(source)
        except BaseException:
            lease.give_back()
            raise
        return Copy(tensor=target, lease=lease)

    def _copy_from_device(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        import torch

        device = source.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side = self._streams[device]
        clone = source.clone(memory_format=torch.contiguous_format)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            target.copy_(clone, non_blocking=True)
            event = side.record_event()
        clone.record_stream(side)
        wait: Callable[[], None] = event.synchronize
        return wait


def check_dense(tensor: torch.Tensor) -> None:
    """Refuse a tensor that has no plain elements.

    Raises:
        CaptureError: for a sparse, quantised or meta tensor.
    """
    import torch

    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise CaptureError(f"a {kind} tensor can not be kept: only dense tensors can")


def size_of(tensor: torch.Tensor) -> int:
    """Bytes that a copy of `tensor` takes."""
    return tensor.numel() * tensor.element_size()


def dense_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A detached, contiguous copy in memory of its own, on the CPU, for a caller who waits for it.

    Raises:
        CaptureError: for a tensor that is not dense.
    """
    import torch

    check_dense(tensor)
    copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return copy.resolve_conj().resolve_neg()


def _tensor_in(lease: Lease, like: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the shape and dtype of `like` whose storage is exactly the lease."""
    import torch

    if lease.size == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    memory = torch.frombuffer(lease.buffer, dtype=like.dtype, count=like.numel(), offset=lease.offset)
    return memory.view(like.shape)
