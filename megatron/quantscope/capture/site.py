"""One module that is watched, and the tap that one of its forwards gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.quantscope.capture.metadata import (
    COMPLETE,
    FORWARD,
    PARTIAL,
    PRE_NORM,
    SAVE_TIME_FORMAT,
    Split,
    TensorMetadata,
    gemm_of,
)

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
    document_ids: tuple[tuple[int, ...], ...] = ()
    grad_scale: float = 1.0
    recomputed: bool = False  # the forward is run again for the backward
    replaying: bool = False  # this is that second forward: its tensors are kept already


@dataclass(frozen=True, kw_only=True)
class Site:
    """A watched module; made by `CaptureSession.site`.

    Attributes:
        session: Where its tensors go.
        module: Full name with global layer numbers, `decoder.layers.0.mlp.linear_fc1`.
        layer_type: "linear" or "attention".
        component: "linear" or "FA".
        layer_idx: Global layer from 0; None for a module outside the layers.
        formats: What each operand of each GEMM is quantised to.
        shards: Tensor name -> how the whole tensor lies over ranks (`metadata.Split`); names left out are whole.
        leave_out: Tensor names that another rank keeps.
        head_dim: As in `TensorMetadata`, of attention.
        softmax_scale: As in `TensorMetadata`, of attention.
        routed: As in `TensorMetadata`, of an expert.
        stages: Tensor name -> its `stage`, where that does not follow from its shards.
    """

    session: CaptureSession
    module: str
    layer_type: str
    component: str
    layer_idx: int | None
    formats: Mapping[str, Any]
    shards: Mapping[str, tuple[Split, ...]]
    leave_out: Collection[str]
    head_dim: int | None = None
    softmax_scale: float | None = None
    routed: bool = False
    stages: Mapping[str, str] = field(default_factory=dict)
    _kept: dict[tuple[str, str], bool] = field(default_factory=dict, repr=False, compare=False)  # what is known by now

    def tap(self) -> Tap | None:
        """`tap(operation, phase, tensor_name, tensor)` bound to this moment; None when nothing is to be kept now."""
        moment = self.session.moment
        return None if moment is None else partial(self._show, moment)

    def _show(self, moment: Moment, operation: str, phase: str, tensor_name: str, tensor: torch.Tensor) -> None:
        if self._keeps(operation, tensor_name) and not (moment.replaying and operation == FORWARD):
            self.session.keep(tensor, Shown(self, moment, operation, phase, tensor_name, time.time()))

    def _keeps(self, operation: str, tensor_name: str) -> bool:
        kept = self._kept.get((operation, tensor_name))
        if kept is None:
            wanted = self.session.config.filter.keeps_tensor(operation, tensor_name)
            kept = self._kept[operation, tensor_name] = wanted and tensor_name not in self.leave_out
        return kept


class Shown(NamedTuple):
    """What the training thread knows of a tensor that it shows; the writers make the metadata of it."""

    site: Site
    moment: Moment
    operation: str
    phase: str
    tensor_name: str
    seconds: float  # since the epoch

    @property
    def iteration(self) -> int:
        """Completed iterations before this one."""
        return self.moment.iteration

    @property
    def coordinates(self) -> tuple[Any, ...]:
        """What tells it from every other tensor of its rank."""
        site = self.site
        where = site.module, site.layer_type, site.component
        return *where, self.moment.iteration, self.moment.micro_batch, self.operation, self.phase, self.tensor_name

    def metadata(self, shape: tuple[int, ...], dtype: torch.dtype) -> TensorMetadata:
        """All that is known of it."""
        site, moment = self.site, self.moment
        shard = site.shards.get(self.tensor_name, ())
        summand = any("reduce" in split for split in shard)
        stage = site.stages.get(self.tensor_name, PARTIAL if summand else COMPLETE)
        gemm = gemm_of(site.layer_type, self.operation, self.tensor_name)
        return TensorMetadata(
            **site.session.identity,
            sample_idx=moment.sample_indices[0] if moment.sample_indices else 0,
            iteration=moment.iteration,
            layer_type=site.layer_type,
            operation=self.operation,
            tensor_name=self.tensor_name,
            layer_idx=site.layer_idx,
            phase=self.phase,
            component=site.component,
            save_time=time.strftime(SAVE_TIME_FORMAT, time.localtime(self.seconds)),
            module=site.module,
            gemm=None if stage == PRE_NORM else gemm,
            sample_indices=moment.sample_indices,
            document_ids=moment.document_ids,
            micro_batch=moment.micro_batch,
            shard=shard,
            shape=shape,
            dtype=str(dtype).removeprefix("torch."),
            stage=stage,
            recomputed=moment.recomputed,
            grad_scale=moment.grad_scale,
            formats=dict(site.formats),
            head_dim=site.head_dim,
            softmax_scale=site.softmax_scale,
            routed=site.routed,
        )
