"""How a module's tensors lie over the ranks of a run: tables of splits, and what a given run leaves of them.

A layout says of each tensor name which splits (`quantscope.capture.metadata.Split`) put the whole together, in the
order in which a reader applies them: the tensor-parallel group first, whose ranks hold parts of what one
context-parallel rank has, then the context-parallel group. It is written for a run that has all axes; `shards` leaves
out those that are one rank. Tensors that a layout does not name are whole everywhere.

    features(d)    dimension d over the tensor-parallel group: heads, hidden or vocabulary
    summands()     one summand a tensor-parallel rank
    tokens(d)      dimension d, the sequence, over the context-parallel group, in the order that balances causal work:
                   of 2 n chunks rank r holds chunks r and 2 n - 1 - r
    token_sums()   one summand a context-parallel rank: what is summed over tokens
    slices(d)      dimension d, the sequence, over the tensor-parallel group where --sequence-parallel is on
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup

from megatron.quantscope.capture.metadata import Split

Layout = Mapping[str, tuple[Split, ...]]

_TENSOR, _CONTEXT = "tp", "cp"
_SEQUENCE_PARALLEL = "sp"  # in a layout only: the tensor-parallel group, where sequence parallelism is on
GATE_AND_UP = 2  # pieces of a gated MLP's first linear layer, of each of which every rank holds its part


def features(dim: int) -> Split:
    """The dimension of features, split over the tensor-parallel group."""
    return {"over": _TENSOR, "dim": dim}


def summands() -> Split:
    """Each tensor-parallel rank has a summand."""
    return {"over": _TENSOR, "reduce": "sum"}


def slices(dim: int) -> Split:
    """The sequence, split over the tensor-parallel group under sequence parallelism."""
    return {"over": _SEQUENCE_PARALLEL, "dim": dim}


def tokens(dim: int) -> Split:
    """The sequence, split over the context-parallel group."""
    return {"over": _CONTEXT, "dim": dim, "order": "zigzag"}


def token_sums() -> Split:
    """Each context-parallel rank has the sum over its tokens."""
    return {"over": _CONTEXT, "reduce": "sum"}


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The axes of a run that split tensors.

    Attributes:
        tensor_parallel: Ranks of the module's tensor-parallel group.
        context_parallel: Ranks of the context-parallel group.
        sequence_parallel: Whether the tensor-parallel group splits the sequence outside the GEMMs.
    """

    tensor_parallel: int = 1
    context_parallel: int = 1
    sequence_parallel: bool = False

    @classmethod
    def of(cls, config: Any, tp_group: ProcessGroup) -> Axes:
        """The axes of a model with this TransformerConfig, for a module that is split over this group."""
        return cls(
            tensor_parallel=tp_group.size(),
            context_parallel=config.context_parallel_size,
            sequence_parallel=config.sequence_parallel,
        )


def shards(layout: Layout, axes: Axes, *, pieces: int = 1) -> dict[str, list[dict[str, Any]]]:
    """What `axes` leave of `layout`: tensor name -> splits; names that are whole are left out.

    Args:
        layout: Tensor name -> splits for all axes.
        axes: Those of the run.
        pieces: Pieces (gate and up) that the dimension of features is made of; each is split by itself.
    """
    found = {
        name: [_settled(split, pieces) for split in splits if _ranks(split, axes) > 1]
        for name, splits in layout.items()
    }
    return {name: splits for name, splits in found.items() if splits}


def _ranks(split: Split, axes: Axes) -> int:
    sequence_parallel = axes.tensor_parallel if axes.sequence_parallel else 1
    sizes = {_TENSOR: axes.tensor_parallel, _CONTEXT: axes.context_parallel, _SEQUENCE_PARALLEL: sequence_parallel}
    return sizes[split["over"]]


def _settled(split: Split, pieces: int) -> dict[str, Any]:
    """`split` as readers know it."""
    if split["over"] == _SEQUENCE_PARALLEL:
        return {**split, "over": _TENSOR}
    if pieces > 1 and split["over"] == _TENSOR and "dim" in split:
        return {**split, "pieces": pieces}
    return dict(split)
