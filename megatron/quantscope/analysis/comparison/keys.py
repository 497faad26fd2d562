"""What a record is, said so that the same tensor of another run says the same.

Where the module is known, a record is a part of a logical tensor (`full_tensor.logical_key`), whose key holds neither
quant type nor rank nor layout. Bare files of other tools, and what a user's own `save_tensor` kept, have no module; of
them counts what the names in both runs tell, and of those that it does not tell apart the order.

A weight does not change within an optimizer step, so the samples and the pass that it was shown in say nothing.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

from megatron.quantscope.analysis.roles import WEIGHT, role_of
from megatron.quantscope.capture.full_tensor import logical_key
from megatron.quantscope.capture.metadata import BACKWARD, UNKNOWN
from megatron.quantscope.capture.record import TensorRecord

_OF_NAME = (
    "iteration",
    "rank",
    "sample_idx",
    "layer_type",
    "layer_idx",
    "operation",
    "phase",
    "component",
    "tensor_name",
)
_OF_WEIGHT = ("iteration", "module", "layer_type", "tensor_name")


def is_weight(record: TensorRecord) -> bool:
    """Whether a record is a weight, as against what flows through the network."""
    return role_of(record.layer_type, record.tensor_name).family == WEIGHT


def told_by_names(*runs: Iterable[TensorRecord]) -> tuple[str, ...]:
    """The parts of a file name that records of each of these runs tell; older forms lack some."""
    told = [
        {name for record in run for name in _OF_NAME if getattr(record, name) not in (None, UNKNOWN)} for run in runs
    ]
    return tuple(name for name in _OF_NAME if all(name in of_run for of_run in told))


def known_by_name(records: Iterable[TensorRecord]) -> bool:
    """Whether only their names tell what the records of a run are."""
    return all(record.module is None for record in records)


def key_of(record: TensorRecord, names: Sequence[str], *, by_name: bool) -> Hashable:
    """Equal for the same tensor of two runs, whatever their layouts.

    Args:
        record: Which.
        names: The parts of its name that count, where its module is not known.
        by_name: Whether they count in any case.
    """
    if by_name or record.module is None:
        return tuple(getattr(record, name) for name in names)
    if is_weight(record):
        return tuple(getattr(record, name) for name in _OF_WEIGHT)
    return logical_key(record)


def execution_key(record: TensorRecord) -> tuple[float, ...]:
    """Sorts the records of a run in the order in which they came to be.

    Each rank has a counter. Of pipeline stages, which count for themselves and take turns, the micro-batch, the pass
    and the layer say which was first.
    """
    stages = record.parallel.get("pp_size", 1)
    place = (0.0, 0.0, 0.0) if stages == 1 else _place_in_pipeline(record, stages)
    return _known(record.iteration), *place, record.counter, _known(record.rank)


def _place_in_pipeline(record: TensorRecord, stages: int) -> tuple[float, float, float]:
    """(micro-batch, backward, depth): the embedding lies before the first layer, the head behind the last."""
    backward = record.operation == BACKWARD
    depth: float = -1 if record.parallel.get("pp_rank") != stages - 1 else math.inf
    if record.layer_idx is not None:
        depth = record.layer_idx
    return _known(record.micro_batch), backward, -depth if backward else depth


def _known(number: int | None) -> int:
    return -1 if number is None else number
