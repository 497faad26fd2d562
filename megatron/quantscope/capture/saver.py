"""Saving a tensor by a direct call: at once, in the caller's thread, with no configuration needed.

The coordinates are those of the call, else of `state.STATE`; the directory is that of the running session, else
TENSOR_SAVE_DIR, else ./enhanced_tensor_logs. `megatron.core.tensor_saver` is the public face.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.quantscope.capture.config import enabled_by_environment, resolve_directory
from megatron.quantscope.capture.errors import CaptureUsageError
from megatron.quantscope.capture.folder import capture_folder
from megatron.quantscope.capture.metadata import (
    FIELDS,
    SAVE_TIME_FORMAT,
    UNKNOWN,
    TensorMetadata,
    gemm_of,
    metadata_values,
)
from megatron.quantscope.capture.names import check_part
from megatron.quantscope.capture.plain import plain
from megatron.quantscope.capture.rows import name_of
from megatron.quantscope.capture.snapshot import dense_copy
from megatron.quantscope.capture.state import STATE, TensorCollectionState

if TYPE_CHECKING:
    import torch

# Fields that a caller's own metadata may set: those that nothing else of the call decides.
_FREE_FIELDS = (
    "module",
    "gemm",
    "sample_indices",
    "micro_batch",
    "parallel",
    "shard",
    "stage",
    "recomputed",
    "formats",
    "head_dim",
    "softmax_scale",
    "routed",
)


class TensorSaver:
    """Writes one file a call.

    Args:
        directory: Capture root; None: as the module's docstring says, asked anew at every call.
        enabled: Whether to save; None: unless TENSOR_SAVE_ENABLED says no.
        state: Where coordinates come from that a call leaves out.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        enabled: bool | None = None,
        state: TensorCollectionState = STATE,
    ) -> None:
        self._directory = directory
        self._enabled = enabled
        self._state = state

    @property
    def enabled(self) -> bool:
        """Set by hand, else what TENSOR_SAVE_ENABLED says, else True."""
        if self._enabled is not None:
            return self._enabled
        said = enabled_by_environment(os.environ)
        return True if said is None else said

    @property
    def directory(self) -> Path:
        """Set by hand, else the running session's, else TENSOR_SAVE_DIR, else the default."""
        return resolve_directory(self._directory or self._state.directory, os.environ)

    def save_tensor(
        self,
        tensor: torch.Tensor | None,
        layer_type: str,
        operation: str,
        quant_type: str,
        tensor_name: str,
        layer_idx: int | None = None,
        phase: str = UNKNOWN,
        component: str = UNKNOWN,
        rank: int | None = None,
        sample_idx: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Save one tensor; the file is there, complete, when this returns.

        Args:
            tensor: Any dense tensor, on any device; None saves nothing.
            layer_type: "linear", "attention" or another word.
            operation: "forward" or "backward".
            quant_type: Names the type folder.
            tensor_name: Role of the tensor: input, weight, grad_output, ...
            layer_idx: Global layer from 0; None: outside the layers.
            phase: "pre" for operands, "post" for results.
            component: "linear", "FA" or another word.
            rank: Global rank; None: the state's.
            sample_idx: Global sample; None: the state's.
            metadata: Further fields (module, formats, shard, ...) and whatever else is worth keeping.

        Returns:
            The file's path; None when saving is off, or there is no tensor.

        Raises:
            CaptureUsageError: for a part that can not be in a file name, and for metadata that can not be kept.
            CaptureError: when the file can not be written; nothing is left behind.
        """
        if tensor is None or not self.enabled:
            return None
        check_part("quant_type", quant_type)  # it is a folder's name
        rank = self._state.current_rank if rank is None else rank
        call = {
            "rank": rank,
            "sample_idx": self._state.current_sample_idx if sample_idx is None else sample_idx,
            "layer_type": layer_type,
            "operation": operation,
            "quant_type": quant_type,
            "tensor_name": tensor_name,
            "layer_idx": layer_idx,
            "phase": phase,
            "component": component,
            "save_time": time.strftime(SAVE_TIME_FORMAT),
            "gemm": gemm_of(layer_type, operation, tensor_name),
            "shape": tuple(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
        row = _row(call, self._state, metadata or {})
        folder = capture_folder(self.directory / quant_type, rank)
        name = name_of(row, folder.next_counter())
        path, _ = folder.write(name, {"tensor": dense_copy(tensor), "metadata": row.to_dict()})
        return str(path)

    def save_linear_tensors(
        self,
        input_tensor: torch.Tensor | None,
        weight: torch.Tensor | None,
        quant_type: str,
        operation: str = "forward",
        layer_idx: int | None = None,
        phase: str = "pre",
        component: str = "linear",
        rank: int | None = None,
        sample_idx: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, str | None]:
        """Save the operands of a linear layer; those that are None are left out.

        Returns:
            Tensor name -> what `save_tensor` returned.
        """
        tensors = {"input": input_tensor, "weight": weight}
        return self._save_all(
            tensors, "linear", operation, quant_type, layer_idx, phase, component, rank, sample_idx, metadata
        )

    def save_attention_tensors(
        self,
        query: torch.Tensor | None,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        quant_type: str,
        operation: str = "forward",
        layer_idx: int | None = None,
        phase: str = "pre",
        component: str = "FA",
        rank: int | None = None,
        sample_idx: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        attention_probs: torch.Tensor | None = None,
    ) -> dict[str, str | None]:
        """Save the operands of an attention; those that are None are left out.

        Returns:
            Tensor name -> what `save_tensor` returned.
        """
        tensors = {"query": query, "key": key, "value": value, "attention_probs": attention_probs}
        return self._save_all(
            tensors, "attention", operation, quant_type, layer_idx, phase, component, rank, sample_idx, metadata
        )

    def _save_all(
        self, tensors: Mapping[str, torch.Tensor | None], layer_type: str, operation: str, quant_type: str, *where: Any
    ) -> dict[str, str | None]:
        return {
            name: self.save_tensor(tensor, layer_type, operation, quant_type, name, *where)
            for name, tensor in tensors.items()
            if tensor is not None
        }


def _row(call: Mapping[str, Any], state: TensorCollectionState, given: Mapping[str, Any]) -> TensorMetadata:
    """The row that a call, the running state and the caller's own metadata describe together."""
    given = plain(given)
    fixed = [name for name in given if name in FIELDS and name not in _FREE_FIELDS]
    if fixed:
        raise CaptureUsageError(f"metadata may not set {fixed[0]}: give it as an argument, or set it in the state")
    running = {"iteration": state.current_iteration, "micro_batch": state.batch_idx, "run_id": state.run_id}
    free = {name: value for name, value in given.items() if name in _FREE_FIELDS}
    extra = {name: value for name, value in given.items() if name not in _FREE_FIELDS}
    return TensorMetadata(
        **metadata_values({**running, **call, **free}), extra={"sequence_idx": state.sequence_idx, **extra}
    )
