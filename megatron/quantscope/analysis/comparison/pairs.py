"""Which tensor of a run is compared with which of the baseline's.

Tensors meet by their keys (`keys.key_of`), of a module that is called twice the n-th with the n-th. Where both runs
have the same layout, each rank's part meets the same rank's, which reads the parts as they lie; otherwise what every
rank kept is put together and the whole tensors are compared, so that TP 1 compares with TP 2. Gradients are compared
without their `grad_scale`. What has no partner is counted.

A pair whose checksums in the manifests are equal, as those of the weights before the first step, need not be read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.analysis.comparison.keys import (
    execution_key,
    is_weight,
    key_of,
    known_by_name,
    told_by_names,
)
from megatron.quantscope.analysis.comparison.runs import Run
from megatron.quantscope.capture.reader import Capture
from megatron.quantscope.capture.record import TensorRecord

if TYPE_CHECKING:
    from torch import Tensor

Parts = list[TensorRecord]

_GRADIENT = "grad_"  # begins the names of tensors that `grad_scale` is a factor of


@dataclass(frozen=True)
class Source:
    """One side of a pair.

    Attributes:
        records: Of all ranks whose parts it is made of, or that hold copies of it.
        assembled: Whether they are put together; else the first is taken as it lies.
    """

    records: tuple[TensorRecord, ...]
    assembled: bool = False

    @property
    def bytes(self) -> int:
        """What is read at the most."""
        return sum(record.bytes for record in (self.records if self.assembled else self.records[:1]))

    @property
    def path(self) -> Path:
        """A file of it, for messages."""
        return next((record.path for record in self.records if record.path is not None), Path())

    def described(self) -> TensorRecord:
        """The first record, of a bare file with what the metadata inside it adds.

        Raises:
            CaptureError: when that file can not be read.
        """
        return self._capture().describe(self.records[0])

    def load(self) -> Tensor:
        """The tensor, memory-mapped unless it was put together.

        Raises:
            CaptureError: when a file is missing or damaged, or a rank's part is not there.
        """
        capture = self._capture()
        return capture.full_tensor(self.records[0]) if self.assembled else capture.load(self.records[0])

    def scale(self, record: TensorRecord) -> float:
        """What the loaded tensor is a multiple of, against what other layouts keep; `record` is the described one."""
        return record.grad_scale if record.tensor_name.startswith(_GRADIENT) and not self.assembled else 1.0

    def _capture(self) -> Capture:
        return Capture(directory=self.path.parent, records=list(self.records))


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same tensor of a run and of the baseline.

    Attributes:
        run, baseline: Labels.
        order: Place of the tensor in the baseline's execution.
        rank: Whose part it is; None: it is the whole tensor.
        tensor: Of the run.
        reference: Of the baseline.
    """

    run: str
    baseline: str
    order: int
    rank: int | None
    tensor: Source
    reference: Source

    @property
    def bytes(self) -> int:
        """What comparing reads."""
        return self.tensor.bytes + self.reference.bytes

    @property
    def equal_by_checksum(self) -> bool:
        """Whether the manifests say that both hold the same bits."""
        if self.tensor.assembled or self.reference.assembled:
            return False
        mine, theirs = self.tensor.records[0], self.reference.records[0]
        told = mine.checksum is not None and mine.shape is not None
        scales = self.tensor.scale(mine), self.reference.scale(theirs)
        return told and _content(mine) == _content(theirs) and scales[0] == scales[1]


@dataclass
class Pairing:
    """What is to be compared.

    Attributes:
        pairs: Run after run, each in the order of the baseline's execution.
        notes: One line for everything that has no partner, or no tensor.
    """

    pairs: list[Pair] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """What comparing all of them reads at the most."""
        return sum(pair.bytes for pair in self.pairs if not pair.equal_by_checksum)


def pair_runs(runs: Sequence[Run]) -> Pairing:
    """The pairs of `runs[0]`, the baseline, and each of the others."""
    pairing = Pairing()
    if len(runs) < 2:
        return pairing
    for run in runs:
        without = sum(record.location is None for record in run.records)
        if without:
            pairing.notes.append(f"{run.label}: {without} rows hold statistics only, and no tensor to compare")
    for run in runs[1:]:
        _pair_with(runs[0], run, pairing)
    return pairing


def _pair_with(baseline: Run, run: Run, pairing: Pairing) -> None:
    by_name = known_by_name(baseline.records) or known_by_name(run.records)
    names = told_by_names(baseline.records, run.records)
    references, tensors = (_tensors(one.records, names, by_name=by_name) for one in (baseline, run))
    alone = [sum(map(len, groups.values())) for groups in (references, tensors)]
    for order, key in enumerate(sorted(references, key=lambda key: execution_key(references[key][0]))):
        for rank, reference, tensor in _sources(references[key], tensors.get(key, []), by_name=by_name):
            pairing.pairs.append(
                Pair(run=run.label, baseline=baseline.label, order=order, rank=rank, tensor=tensor, reference=reference)
            )
            alone[0] -= len(reference.records)
            alone[1] -= len(tensor.records)
    for count, one, other in ((alone[0], baseline, run), (alone[1], run, baseline)):
        if count:
            pairing.notes.append(f"{one.label}: {count} tensors have no partner in {other.label}")


def _tensors(records: Iterable[TensorRecord], names: Sequence[str], *, by_name: bool) -> dict[Hashable, Parts]:
    """Key and number of its occurrence -> the records of all ranks, the lowest rank's first.

    Of a weight the first record of an optimizer step counts, and the others are the same.
    """
    found: dict[Hashable, Parts] = defaultdict(list)
    seen: dict[Hashable, int] = {}
    for record in records:
        if record.location is None or (by_name and record.reference and is_weight(record)):
            continue
        key = key_of(record, names, by_name=by_name)
        number = seen[key, record.rank] = seen.get((key, record.rank), -1) + 1
        if number and is_weight(record) and record.module is not None and not by_name:
            continue
        found[key, number].append(replace(record, statistics=None, blocks=None))  # light: it travels to a worker
    for parts in found.values():
        parts.sort(key=lambda record: record.rank or 0)
    return found


def _sources(references: Parts, tensors: Parts, *, by_name: bool) -> list[tuple[int | None, Source, Source]]:
    """(rank, of the baseline, of the run): part by part as far as the layouts are the same, else the whole."""
    if not tensors:
        return []
    if by_name:
        of_rank = {record.rank: record for record in tensors}
        same = [(one.rank, Source((one,)), Source((of_rank[one.rank],))) for one in references if one.rank in of_rank]
        return same or [(references[0].rank, Source((references[0],)), Source((tensors[0],)))]
    mine, theirs = _by_layout(tensors), _by_layout(references)
    common = [layout for layout in theirs if layout in mine]
    if common:
        return [(theirs[layout].rank, Source((theirs[layout],)), Source((mine[layout],))) for layout in common]
    return [(None, _whole(references), _whole(tensors))]


def _by_layout(parts: Parts) -> Mapping[Hashable, TensorRecord]:
    """Which part of which layout a record is -> the record."""
    return {
        (record.rank, json.dumps(record.shard, sort_keys=True), tuple(sorted(record.parallel.items()))): record
        for record in parts
    }


def _whole(parts: Parts) -> Source:
    return Source(tuple(parts), assembled=bool(parts[0].shard))


def _content(record: TensorRecord) -> Hashable:
    return record.checksum, record.shape, record.dtype
