"""Single tensors, or single layers of stacked ones, out of a torch_dist checkpoint: no process group, no model.

PyTorch's distributed checkpoint keeps a tensor as pieces in files, and one index of them all. Loading asks for regions
of tensors; here a region is one tensor, or one row of its first dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


@dataclass(frozen=True)
class StoredTensor:
    """What the index says of a tensor: global shape, dtype, and where its pieces lie in it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: TensorStorageMetadata


class TorchDistReader:
    """The tensors of one checkpoint folder.

    Attributes:
        tensors: name -> what the index says of it.

    Raises:
        OSError, ValueError, EOFError and others of PyTorch's: the index is missing or broken.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = FileSystemReader(str(folder))
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self.tensors: Mapping[str, StoredTensor] = {
            name: StoredTensor(tuple(stored.size), stored.properties.dtype, stored)
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def read(self, name: str, row: int | None = None) -> torch.Tensor:
        """Read a tensor, or `row` of its first dimension alone, in the dtype of the checkpoint.

        Raises:
            ValueError: pieces of it are missing.
        """
        stored = self.tensors[name]
        offsets = [0 if row is None else row, *(0 for _ in stored.shape[1:])]
        sizes = [stored.shape[0] if row is None else 1, *stored.shape[1:]]
        region = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(name, stored.pieces, [region])
        if sum(math.prod(item.lengths) for item in items) != math.prod(sizes):
            raise ValueError("parts of it are missing")
        result = torch.empty(sizes, dtype=stored.dtype)
        self._reader.read_data(LoadPlan(items), _Into(result)).wait()
        return result if row is None else result[0]


class _Into(LoadPlanner):
    """Tells the reader to put what it reads of a region into a tensor of the region's shape."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        part = self._target
        for dimension, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dimension, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: `tensor` is the part of the target itself."""

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("reading a region needs no state dict")

    create_local_plan = create_global_plan = finish_plan = load_bytes = set_up_planner  # type: ignore[assignment]
