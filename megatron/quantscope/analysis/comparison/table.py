"""The comparison as a table, one row a compared tensor; `comparison.parquet` holds the same columns."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.quantscope.analysis.comparison.measures import Measures, equal_measures, measure_pair
from megatron.quantscope.analysis.comparison.pairs import Pair, Pairing, pair_runs
from megatron.quantscope.analysis.comparison.runs import Run
from megatron.quantscope.analysis.roles import module_label, role_of
from megatron.quantscope.analysis.workers import Workers
from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.record import TensorRecord

if TYPE_CHECKING:
    import pandas
    from torch import Tensor

logger = logging.getLogger(__name__)

Row = dict[str, Any]

COLUMNS: Mapping[str, str] = {
    "run": "string",
    "baseline": "string",
    "iteration": "int64",
    "micro_batch": "int64",
    "sample_idx": "int64",
    "rank": "int64",
    "layer_idx": "int64",
    "module": "string",
    "site": "string",
    "symbol": "string",
    "family": "string",
    "operation": "string",
    "phase": "string",
    "tensor_name": "string",
    "order": "int64",
    "equal": "bool",
    "sqnr_db": "float64",
    "cosine": "float64",
    "relative_l2": "float64",
    "max_error": "float64",
    "count": "int64",
}
"""Column -> type. `sqnr_db` to `count` are `measures.Measures`; what is not known is null."""
_OF_RECORD = ("iteration", "micro_batch", "sample_idx", "layer_idx", "module", "operation", "phase", "tensor_name")


@dataclass
class ComparisonLog:
    """What came of a comparison; filled while it goes on.

    Attributes:
        read: Pairs that were read.
        unread: Pairs that the manifests' checksums say are equal.
        bytes: Of the tensors that were read.
        problems: One line for every pair that could not be compared.
        notes: One line for everything that has no partner.
    """

    read: int = 0
    unread: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare(
    runs: Sequence[Run],
    workers: Workers,
    *,
    advance: Callable[[int], None] = lambda size: None,
    log: ComparisonLog | None = None,
) -> pandas.DataFrame:
    """Compare every run with the first, tensor by tensor.

    Args:
        runs: What `runs_of` gave; the first is the baseline.
        workers: Where to read the tensors.
        advance: Called with the bytes of each pair when it is done; all of them are `pair_runs(runs).bytes`.
        log: Filled as it goes on.

    Returns:
        A table of `COLUMNS`, run after run, each in the order of execution.
    """
    return compare_pairs(pair_runs(runs), workers, advance=advance, log=log)


def compare_pairs(
    pairing: Pairing,
    workers: Workers,
    *,
    advance: Callable[[int], None] = lambda size: None,
    log: ComparisonLog | None = None,
) -> pandas.DataFrame:
    """As `compare`, of pairs that `pair_runs` made."""
    import pyarrow

    log = ComparisonLog() if log is None else log
    log.notes += pairing.notes
    for note in pairing.notes:
        logger.info("%s", note)
    rows: dict[int, Row] = {}
    groups = _to_read(pairing.pairs, rows)
    log.unread += len(rows)
    found = workers.map(compare_group, [[pairing.pairs[place] for place in group] for group in groups])
    for group, outcomes in zip(groups, found, strict=True):
        for place, outcome in zip(group, outcomes, strict=True):
            size = pairing.pairs[place].bytes
            if isinstance(outcome, str):
                _tell(outcome, log)
            else:
                log.read += 1
                log.bytes += size
                rows[place] = outcome
            advance(size)
    schema = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in COLUMNS.items()])
    return pyarrow.Table.from_pylist([rows[place] for place in sorted(rows)], schema=schema).to_pandas()


def _to_read(pairs: Sequence[Pair], rows: dict[int, Row]) -> list[list[int]]:
    """The places of the pairs that must be read, those with the same tensor of the baseline together.

    The rows of the others are put into `rows`.
    """
    groups: dict[Hashable, list[int]] = {}
    for place, pair in enumerate(pairs):
        if pair.equal_by_checksum:
            record = pair.reference.records[0]
            rows[place] = _row(pair, record, equal_measures(math.prod(record.shape or ())))
        else:
            groups.setdefault((pair.order, pair.rank, pair.reference.assembled), []).append(place)
    return list(groups.values())


def _tell(problem: str, log: ComparisonLog) -> None:
    """Note a problem; one of the baseline's tensor meets every run."""
    if problem not in log.problems:
        logger.warning("%s", problem)
        log.problems.append(problem)


def compare_group(pairs: Sequence[Pair]) -> list[Row | str]:
    """Compare one tensor of the baseline with its partners; a line for what can not be read or compared."""
    source = pairs[0].reference
    try:
        record, reference = source.described(), source.load()
    except CaptureError as error:
        return [f"{pairs[0].baseline}: {error}"] * len(pairs)
    return [_compared(pair, record, reference) for pair in pairs]


def _compared(pair: Pair, record: TensorRecord, reference: Tensor) -> Row | str:
    try:
        described = pair.tensor.described()
        tensor = pair.tensor.load()
        scales = {"scale": pair.tensor.scale(described), "reference_scale": pair.reference.scale(record)}
        return _row(pair, record, measure_pair(tensor, reference, **scales))
    except CaptureError as error:
        return f"{pair.run}: {error}"
    except (TypeError, ValueError, RuntimeError, MemoryError) as error:  # shapes, dtypes, a file cut while it is read
        reason = str(error).partition("\n")[0]
        return f"{pair.run}: {pair.tensor.path.name}: can not be compared: {reason}"


def _row(pair: Pair, record: TensorRecord, measures: Measures) -> Row:
    role = role_of(record.layer_type, record.tensor_name)
    row = {name: getattr(record, name) for name in _OF_RECORD} | asdict(measures)
    return row | {
        "run": pair.run,
        "baseline": pair.baseline,
        "rank": pair.rank,
        "order": pair.order,
        "site": f"{module_label(record.module, record.layer_type)}.{role.symbol}",
        "symbol": role.symbol,
        "family": role.family,
    }
