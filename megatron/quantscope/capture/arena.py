"""Host memory that copies of tensors wait in, given out and taken back by size, bounded as a whole.

One private mapping of the whole bound is made at the first use; the kernel gives it pages as they are touched. Room is
always given at the lowest address that has enough, so a page that was touched is touched again as soon as it is free: a
step that keeps up with its writers stays in a few warm megabytes, where a fresh page costs six times the copy into it
(0.7 against 0.12 ns a byte here). For CUDA the mapping is registered with the driver ("pinned"), so that the copy
engine can write to it while the GPU computes; that touches all of it at once.

Waiting for room is the back-pressure, and the only time a disk can hold a training up. A tensor larger than the whole
bound waits until everything else is written, and then gets memory of its own.
"""

from __future__ import annotations

import bisect
import logging
import mmap
import threading
import time

from megatron.quantscope.capture.errors import CaptureError

log = logging.getLogger(__name__)

ALIGNMENT = 64  # bytes: a cache line, and what every dtype and vector instruction is content with


class Lease:
    """Memory of one copy: `buffer[offset : offset + size]`; given back once, by any thread."""

    __slots__ = ("_arena", "buffer", "offset", "size")

    def __init__(self, arena: HostArena, buffer: mmap.mmap, offset: int, size: int) -> None:
        self._arena = arena
        self.buffer = buffer
        self.offset = offset
        self.size = size

    def give_back(self) -> None:
        """Let others have the memory; nothing may look at it any more."""
        self._arena.give_back(self)


class HostArena:
    """Gives out leases. `take` belongs to one thread, giving back to any.

    Args:
        limit_bytes: Bound of what is out at a time.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.waited_seconds = 0.0  # by `take`, for room
        self.peak_bytes = 0
        self._limit = max(ALIGNMENT, _aligned(limit_bytes))
        self._mapping: mmap.mmap | None = None
        self._pinned = False
        self._free = [(0, self._limit)]  # (offset, size), by offset, no two of them adjacent
        self._out = 0
        self._room = threading.Condition()

    def take(self, size: int, *, pinned: bool = False) -> Lease:
        """Memory for `size` bytes; waits until there is as much.

        Raises:
            CaptureError: when the system has no memory left.
        """
        room = _aligned(size)
        with self._room:
            offset = self._find(room)
            if offset is None:
                start = time.perf_counter()
                while offset is None and not (room > self._limit and self._out == 0):
                    self._room.wait()
                    offset = self._find(room)
                self.waited_seconds += time.perf_counter() - start
            self._out += room
            self.peak_bytes = max(self.peak_bytes, self._out)
        if offset is None:
            return Lease(self, _mapping_of(room), 0, size)
        return Lease(self, self._memory(pinned), offset, size)

    def has_room(self, size: int) -> bool:
        """Whether `take` would not wait."""
        room = _aligned(size)
        with self._room:
            return self._out <= self._limit and any(gap >= room for _, gap in self._free)

    def give_back(self, lease: Lease) -> None:
        """Called by `Lease.give_back`."""
        room = _aligned(lease.size)
        with self._room:
            if lease.buffer is self._mapping:
                self._insert(lease.offset, room)
            self._out -= room
            self._room.notify_all()

    def close(self) -> None:
        """Let the memory go; no lease may be out."""
        if self._pinned and self._mapping is not None:
            _unregister(self._mapping)
        self._mapping = None

    def _memory(self, pinned: bool) -> mmap.mmap:
        if self._mapping is None:
            self._mapping = _mapping_of(self._limit)
        if pinned and not self._pinned:
            self._pinned = True
            _register(self._mapping)
        return self._mapping

    def _find(self, room: int) -> int | None:
        """Take `room` bytes off the first gap that has them; None: no gap has, or what is larger than all is out."""
        if self._out > self._limit:
            return None
        for index, (offset, size) in enumerate(self._free):
            if size >= room:
                if size == room:
                    del self._free[index]
                else:
                    self._free[index] = (offset + room, size - room)
                return offset
        return None

    def _insert(self, offset: int, size: int) -> None:
        """Put a gap back, joined with its neighbours."""
        index = bisect.bisect(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == offset:
            index -= 1
            offset, before = self._free.pop(index)
            size += before
        self._free.insert(index, (offset, size))


def _aligned(size: int) -> int:
    """The next multiple of the alignment, and never 0: an empty tensor's lease is one too."""
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT


def _mapping_of(size: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_DONTFORK"):  # a child would keep, page by page, what is written over here
            mapping.madvise(mmap.MADV_DONTFORK)
        return mapping
    except OSError as error:
        raise CaptureError(f"no memory for {size} bytes of tensors: lower --tensor-host-memory-gb ({error})") from error


def _address(mapping: mmap.mmap) -> int:
    import torch

    return torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()


def _register(mapping: mmap.mmap) -> None:
    import torch

    error = torch.cuda.cudart().cudaHostRegister(_address(mapping), len(mapping), 0)  # type: ignore[no-untyped-call]
    if int(error) != 0:  # copies are slower then, and right
        log.warning("%d bytes of host memory can not be pinned (CUDA error %d)", len(mapping), int(error))


def _unregister(mapping: mmap.mmap) -> None:
    import torch

    torch.cuda.cudart().cudaHostUnregister(_address(mapping))  # type: ignore[no-untyped-call]
