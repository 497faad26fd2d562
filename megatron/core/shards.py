"""How a module's tensors lie over the ranks of a run: tables of splits, and what a given run leaves of them.

A layout says of each tensor name which splits (`quantscope.capture.metadata.Split`) put the whole together, in the
order in which a reader applies them: the tensor-parallel group first, whose ranks hold parts of what one
context-parallel rank has, then the context-parallel group. It is written for a run that has all axes; `shards` leaves
out those that are one rank. Tensors that a layout does not name are whole everywhere. The experts of a mixture have the
layouts of their classes too, read along the axes that experts have (`Axes.of_expert`).

    features(d)    dimension d over the tensor-parallel group: heads, hidden or vocabulary
    summands()     one summand a tensor-parallel rank
    tokens(d)      dimension d, the sequence, over the context-parallel group, in the order that balances causal work:
                   of 2 n chunks rank r holds chunks r and 2 n - 1 - r
    token_sums()   one summand a context-parallel rank: what is summed over tokens
    slices(d)      dimension d, the sequence, over the tensor-parallel group where --sequence-parallel is on
    slice_sums()   one summand a tensor-parallel rank there: what is summed over its slice
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup

from megatron.quantscope.capture.metadata import Split

Layout = Mapping[str, tuple[Split, ...]]

_TENSOR, _CONTEXT, _EXPERT_TENSOR = "tp", "cp", "etp"
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


def slice_sums() -> Split:
    """Each tensor-parallel rank has the sum over its slice of the sequence, under sequence parallelism."""
    return {"over": _SEQUENCE_PARALLEL, "reduce": "sum"}


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
        expert: Whether the module belongs to an expert of a mixture: its rows are no positions of a sequence.
    """

    tensor_parallel: int = 1
    context_parallel: int = 1
    sequence_parallel: bool = False
    expert: bool = False

    @classmethod
    def of(cls, config: Any, tp_group: ProcessGroup) -> Axes:
        """The axes of a model with this TransformerConfig, for a module that is split over this group."""
        return cls(
            tensor_parallel=tp_group.size(),
            context_parallel=config.context_parallel_size,
            sequence_parallel=config.sequence_parallel,
        )

    @classmethod
    def of_expert(cls, config: Any, tp_group: ProcessGroup) -> Axes:
        """The same for an expert, whose weights lie over this group.

        With expert parallelism an expert gets all tokens of a sample that are routed to it. Without, every
        context-parallel rank has a copy of the expert, for the tokens of its own.
        """
        copies = config.context_parallel_size if config.expert_model_parallel_size == 1 else 1
        return cls(tensor_parallel=tp_group.size(), context_parallel=copies, expert=True)


def shards(layout: Layout, axes: Axes, *, pieces: int = 1) -> dict[str, list[dict[str, Any]]]:
    """What `axes` leave of `layout`: tensor name -> splits; names that are whole are left out.

    Args:
        layout: Tensor name -> splits for all axes.
        axes: Those of the run.
        pieces: Pieces (gate and up) that the dimension of features is made of; each is split by itself.
    """
    found = {
        name: [_settled(split, axes, pieces) for split in splits if _ranks(split, axes) > 1]
        for name, splits in layout.items()
    }
    return {name: splits for name, splits in found.items() if splits}


def _ranks(split: Split, axes: Axes) -> int:
    sequence_parallel = axes.tensor_parallel if axes.sequence_parallel else 1
    sizes = {_TENSOR: axes.tensor_parallel, _CONTEXT: axes.context_parallel, _SEQUENCE_PARALLEL: sequence_parallel}
    return sizes[split["over"]]


def _settled(split: Split, axes: Axes, pieces: int) -> dict[str, Any]:
    """`split` as readers know it."""
    if split["over"] == _SEQUENCE_PARALLEL:
        return {**split, "over": _TENSOR}
    if pieces > 1 and split["over"] == _TENSOR and "dim" in split:
        split = {**split, "pieces": pieces}
    if not axes.expert:
        return dict(split)
    if split["over"] == _TENSOR:
        return {**split, "over": _EXPERT_TENSOR}
    return {name: value for name, value in split.items() if name != "order"}  # the copies' rows follow each other
