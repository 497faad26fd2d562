"""One module that is watched, and the tap that one of its forwards gets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.quantscope.capture.metadata import COMPLETE, TensorMetadata, gemm_of

if TYPE_CHECKING:
    import torch

    from megatron.quantscope.capture.session import CaptureSession

Tap = Callable[[str, str, str, "torch.Tensor"], None]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When a forward runs: bound by its tap, so that the backward's tensors carry it too."""

    iteration: int
    micro_batch: int
    sample_indices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Site:
    """A watched module; made by `CaptureSession.site`, which documents the attributes."""

    session: CaptureSession
    module: str
    layer_type: str
    component: str
    layer_idx: int | None
    formats: Mapping[str, Any]
    shards: Mapping[str, Mapping[str, Any]]
    stages: Mapping[str, str]
    leave_out: Collection[str]

    def tap(self) -> Tap | None:
        """`tap(operation, phase, tensor_name, tensor)` bound to this moment; None when nothing is to be kept now."""
        moment = self.session.moment
        return None if moment is None else partial(self._keep, moment)

    def _keep(self, moment: Moment, operation: str, phase: str, tensor_name: str, tensor: torch.Tensor) -> None:
        if tensor_name in self.leave_out or not self.session.config.filter.keeps_tensor(operation, tensor_name):
            return
        metadata = TensorMetadata(
            **self.session.identity,
            sample_idx=moment.sample_indices[0] if moment.sample_indices else 0,
            iteration=moment.iteration,
            layer_type=self.layer_type,
            operation=operation,
            tensor_name=tensor_name,
            layer_idx=self.layer_idx,
            phase=phase,
            component=self.component,
            module=self.module,
            gemm=gemm_of(self.layer_type, operation, tensor_name),
            sample_indices=moment.sample_indices,
            micro_batch=moment.micro_batch,
            shard=dict(self.shards[tensor_name]) if tensor_name in self.shards else None,
            stage=self.stages.get(tensor_name, COMPLETE),
            formats=dict(self.formats),
        )
        self.session.keep(tensor, metadata)
