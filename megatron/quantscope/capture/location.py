"""Where the elements of a kept tensor lie, whichever store they are in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.capture.segment_file import map_tensor
from megatron.quantscope.capture.tensor_file import load_file

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Location:
    """A place on disk; equal places hold one tensor, so it tells apart what is stored once and referred to often.

    Attributes:
        path: A file of one tensor (`pt`), or a segment.
        offset: Of the first element in a segment, in bytes; None: the file holds this tensor alone, and says itself
            what shape and dtype it has.
        shape: Elements along each dimension, in a segment.
        dtype: torch's name, in a segment.
    """

    path: Path
    offset: int | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""

    def load(self) -> torch.Tensor:
        """The tensor, memory-mapped: what is looked at is read, and what is written to it stays in memory.

        Raises:
            CaptureError: when the file is missing or damaged.
        """
        if self.offset is None:
            return load_file(self.path)[0]
        return map_tensor(self.path, self.offset, self.shape, self.dtype)
