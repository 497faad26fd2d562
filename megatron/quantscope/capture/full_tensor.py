"""The tensor as one rank would have it, put together from what every rank kept of it.

A record is one rank's part of a *logical tensor*: the same operand or result of the same module for the same samples,
whatever the layout. Its `shard` names the steps from the part to the whole (`metadata.Split`), and `parallel` says
which part it is. Records that no split tells apart are copies (a gathered input, a weight under data or context
parallelism): the lowest rank's is taken.

Splits are undone in their order, the first of them first: it is the one that lies innermost, as when tensor-parallel
ranks share one context-parallel rank's part of the sequence. Along different dimensions, and for sums, any other order
gives the same.

Summands are added in float64 and rounded once, to the dtype they have; with the rounding that each had before, that is
what a layout can differ by. Gradients are kept as the training had them, multiplied by `grad_scale`, which depends on
the layout. It is divided off here, so that captures of TP 1 and of TP 2, DP 2 or CP 2 compare element by element:

    other = {logical_key(record): record for record in b.logical}
    for record in a.logical:
        x, y = a.full_tensor(record), b.full_tensor(other[logical_key(record)])

A pipeline leaves modules whole: their names count layers over all stages. The micro-batch's number and the rank say
nothing about what a tensor is; the samples do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.metadata import Split
from megatron.quantscope.capture.record import TensorRecord

if TYPE_CHECKING:
    import torch

    from megatron.quantscope.capture.reader import Capture

_KEY = (
    "iteration",
    "sample_indices",
    "module",
    "layer_type",
    "operation",
    "phase",
    "tensor_name",
    "component",
)
_GRADIENT = "grad_"  # begins the names of the tensors that `grad_scale` is a factor of; a backward has weights too
_Part = tuple[int, ...]  # rank along the axis of each split


def logical_key(record: TensorRecord) -> Hashable:
    """What a record is a part of; equal for all its ranks, and for the same tensor of another layout's capture."""
    return tuple(getattr(record, name) for name in _KEY)


def logical_tensors(capture: Capture) -> Iterator[TensorRecord]:
    """One record of every logical tensor, the lowest rank's, in the order of the records."""
    return iter(capture.logical)


def full_tensor(capture: Capture, record: TensorRecord, *, unscaled: bool = True) -> torch.Tensor:
    """The whole tensor of which `record` is one rank's part.

    Args:
        capture: Where the records of the other ranks are.
        record: Any rank's.
        unscaled: Divide gradients by their `grad_scale`, rounded once to their dtype. In float16 with a loss scale this
            may underflow, as the loss scale is there to prevent.

    Raises:
        CaptureError: when a rank's part is missing, with what it is called; when the parts do not fit together, or can
            not be read.
    """
    copies = capture.logical.of(record)
    first = copies[0]
    for each in copies:
        if each.shard != first.shard:
            raise CaptureError(f"{record.title}: ranks {first.rank} and {each.rank} say that it is split differently")
    parts = {part: capture.load(each) for part, each in _chosen(copies, record).items()}
    try:
        whole = _assemble(parts, first.shard)
    except (RuntimeError, ValueError, IndexError) as error:
        reason = str(error).partition("\n")[0]
        raise CaptureError(f"{record.title}: the parts do not fit together: {reason}") from error
    scaled = unscaled and first.grad_scale != 1 and first.tensor_name.startswith(_GRADIENT)
    if scaled:
        whole = _wide(whole) / first.grad_scale
    return whole.to(next(iter(parts.values())).dtype)


class LogicalTensors:
    """The records of a capture, grouped by the logical tensor they are parts of. Iterating gives one record of each.

    Where a rank has kept a key more than once (a module that is called twice), its n-th belongs with the others' n-th.
    """

    def __init__(self, records: Iterable[TensorRecord]) -> None:
        self._groups: dict[Hashable, list[TensorRecord]] = {}
        self._group_of: dict[Hashable, Hashable] = {}
        seen: dict[Hashable, int] = {}
        for record in records:
            of_run = (record.quant_type, record.run_id, logical_key(record))
            number = seen[of_run, record.rank] = seen.get((of_run, record.rank), -1) + 1
            self._groups.setdefault((of_run, number), []).append(record)
            self._group_of[_identity(record)] = (of_run, number)
        for group in self._groups.values():
            group.sort(key=lambda record: record.rank or 0)

    def __iter__(self) -> Iterator[TensorRecord]:
        """The record of the lowest rank of every logical tensor."""
        return (group[0] for group in self._groups.values())

    def __len__(self) -> int:
        """How many logical tensors there are."""
        return len(self._groups)

    def of(self, record: TensorRecord) -> Sequence[TensorRecord]:
        """All ranks' records of the logical tensor, the lowest rank's first.

        Raises:
            CaptureError: for a record of another capture.
        """
        group = self._group_of.get(_identity(record))
        if group is None:
            raise CaptureError(f"{record.title}: not a record of this capture")
        return self._groups[group]


def _identity(record: TensorRecord) -> Hashable:
    return record.quant_type, record.run_id, record.rank, record.counter, record.path


def _chosen(copies: Sequence[TensorRecord], record: TensorRecord) -> dict[_Part, TensorRecord]:
    """The record of every part: among copies the lowest rank's.

    Raises:
        CaptureError: when a part is missing.
    """
    axes = [split["over"] for split in copies[0].shard]
    try:
        found: dict[_Part, TensorRecord] = {}
        for each in copies:
            found.setdefault(tuple(each.parallel[f"{axis}_rank"] for axis in axes), each)
        sizes = [copies[0].parallel[f"{axis}_size"] for axis in axes]
    except KeyError as error:
        raise CaptureError(f"{record.title}: it is split, and {error} is not known") from None
    parts = list(product(*map(range, sizes)))
    missing = [part for part in parts if part not in found]
    if missing:
        raise CaptureError(f"{record.title}: the part of {_called(missing, axes, sizes)} is missing")
    return {part: found[part] for part in parts}


def _called(parts: Sequence[_Part], axes: Sequence[str], sizes: Sequence[int]) -> str:
    """`tp_rank 1 of 2 and cp_rank 0 of 2; ...`."""
    words = [
        " and ".join(f"{axis}_rank {rank} of {size}" for axis, rank, size in zip(axes, part, sizes, strict=True))
        for part in parts
    ]
    return "; ".join(words)


def _assemble(parts: Mapping[_Part, torch.Tensor], shard: Sequence[Split]) -> torch.Tensor:
    """Undo the splits one after the other; each leaves parts that differ in the ranks of the later ones only."""
    for split in shard:
        along: dict[_Part, list[torch.Tensor]] = {}
        for part, tensor in parts.items():  # in the order of the ranks
            along.setdefault(part[1:], []).append(tensor)
        parts = {rest: _undo(split, tensors) for rest, tensors in along.items()}
    (whole,) = parts.values()
    return whole


def _undo(split: Split, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of those that the ranks along a split's axis have."""
    import torch

    if split.get("reduce") == "sum":
        return torch.stack([_wide(tensor) for tensor in tensors]).sum(dim=0)
    dim, pieces = split["dim"], split.get("pieces", 1)
    of_rank = [_equal_parts(tensor, pieces, dim) for tensor in tensors]
    chunks = [chunk for piece in zip(*of_rank, strict=True) for chunk in _in_order(piece, split)]
    return torch.cat(chunks, dim=dim)


def _in_order(tensors: Sequence[torch.Tensor], split: Split) -> Sequence[torch.Tensor]:
    """The chunks that the ranks hold in the order in which they lie in the whole."""
    order = split.get("order", "ranks")
    if order == "ranks":
        return tensors
    if order != "zigzag":
        raise ValueError(f"the order {order!r} is not known")
    halves = [_equal_parts(tensor, 2, split["dim"]) for tensor in tensors]
    return [first for first, _ in halves] + [second for _, second in reversed(halves)]


def _equal_parts(tensor: torch.Tensor, count: int, dim: int) -> Sequence[torch.Tensor]:
    if tensor.shape[dim] % count:
        raise ValueError(f"{tensor.shape[dim]} elements along dimension {dim} are not {count} equal parts")
    size = tensor.shape[dim] // count
    return [tensor.narrow(dim, index * size, size) for index in range(count)]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The dtype to compute in: float64, complex128 for complex numbers, int64 for whole ones."""
    import torch

    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64 if tensor.dtype.is_floating_point else torch.int64)
