"""The one pass over a capture: every tensor is read once, by one worker, and becomes a row of the summary table.

A worker holds one tensor, memory-mapped, and a few megabytes beside it; what comes back is a row. So memory does not
grow with the capture, and a tensor of any size costs its pages once. One that can not be read becomes a `Problem` and
the scan goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from megatron.quantscope.analysis.format_errors import Treatment
from megatron.quantscope.analysis.identity import KEY, key_of
from megatron.quantscope.analysis.manifest_row import manifest_row
from megatron.quantscope.analysis.pt_location import pt_location
from megatron.quantscope.analysis.roles import WEIGHT, role_of
from megatron.quantscope.analysis.summary import summarize
from megatron.quantscope.analysis.tables import Row, summary_row
from megatron.quantscope.analysis.workers import Workers
from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.location import Location
from megatron.quantscope.capture.reader import Capture
from megatron.quantscope.capture.record import TensorRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problem:
    """Something that could not be read.

    Attributes:
        file: The path of its file.
        reason: One line.
    """

    file: Path
    reason: str


@dataclass
class ScanLog:
    """What came of a scan; filled while its rows are drawn.

    Attributes:
        files: Tensors that were read.
        bytes: Their bytes.
        without_tensor: Tensors of which only statistics were kept.
        reused: Tensors that were not read since the figures of the same bytes were known.
        problems: What could not be read.
    """

    files: int = 0
    bytes: int = 0
    without_tensor: int = 0
    reused: int = 0
    problems: list[Problem] = field(default_factory=list)


def distinct_records(capture: Capture) -> list[TensorRecord]:
    """One record a tensor: the first of the rows that stand for it, as they were shown.

    A weight's rows of one iteration stand for one tensor. Other rows that share bytes in a segment do not: an output
    that is the next module's input plays two parts, and a `pt` capture holds it twice.
    """
    first: dict[Hashable, TensorRecord] = {}
    for record in capture.records:
        first.setdefault(_tensor_key(record, record.location), record)
    return list(first.values())


def _tensor_key(record: TensorRecord, location: Location | None) -> Hashable:
    if location is not None and record.offset is None:
        return location
    of_step = role_of(record.layer_type, record.tensor_name).family == WEIGHT
    moment = (record.rank, record.iteration, None if of_step else record.micro_batch)
    part = (record.module, record.layer_type, record.tensor_name)
    if location is None:
        return record.run_folder, moment, part, None if of_step else record.counter
    return location, moment, part


def scan(
    capture: Capture,
    workers: Workers,
    treatments: tuple[Treatment, ...],
    log: ScanLog,
    advance: Callable[[int], None] = lambda size: None,
    records: Sequence[TensorRecord] | None = None,
) -> Iterator[Row]:
    """Read every tensor of a capture once; of those that have statistics only, the manifest.

    Args:
        capture: What to read.
        workers: Where to read it.
        treatments: What to try on each tensor.
        log: Filled as the scan goes on.
        advance: Called with the bytes of each tensor when it is done.
        records: Which of `distinct_records`; None: all.

    Yields:
        Rows of the summary table, in the order of the records.
    """
    handle = replace(capture, records=[], problems=[])  # what a worker needs to open files
    measure = partial(measure_record, handle, treatments)
    for record, outcome in workers.map(measure, distinct_records(capture) if records is None else records):
        if isinstance(outcome, Problem):
            logger.warning("%s: %s", outcome.file.name, outcome.reason)
            log.problems.append(outcome)
        else:
            log.files += record.location is not None
            log.without_tensor += record.location is None
            log.bytes += record.bytes
            yield outcome
        advance(record.bytes)


def measure_record(
    capture: Capture, treatments: tuple[Treatment, ...], record: TensorRecord
) -> tuple[TensorRecord, Row | Problem]:
    """Read and summarise one tensor; what can not be read or measured becomes a `Problem`."""
    key = key_of(record)
    if record.location is None:
        return record, manifest_row(record) | {KEY: key}
    try:
        known = capture.describe(record)
        place = pt_location(known)
        tensor = capture.load(known) if place is None else place.load()
        role = role_of(known.layer_type, known.tensor_name)
        summary = summarize(tensor, role, treatments=treatments, head_dim=known.head_dim)
    except CaptureError as error:
        return record, Problem(record.path or capture.directory, str(error))
    except (TypeError, RuntimeError, MemoryError) as error:  # a dtype without real values, a file cut while it was read
        reason = str(error).partition("\n")[0]
        return record, Problem(record.path or capture.directory, f"can not be measured: {reason}")
    known = replace(known, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
    return record, summary_row(known, summary) | {KEY: key}
