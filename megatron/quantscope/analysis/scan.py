"""The one pass over a capture: every file is read once, by one worker, and becomes a row of the summary table.

A worker holds one tensor, memory-mapped, and a few megabytes beside it; what comes back is a row. So memory does not
grow with the capture, and a tensor file of any size costs its pages once. A file that can not be read becomes a
`Problem` and the scan goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from megatron.quantscope.analysis.format_errors import Treatment
from megatron.quantscope.analysis.roles import role_of
from megatron.quantscope.analysis.summary import summarize
from megatron.quantscope.analysis.tables import Row, summary_row
from megatron.quantscope.analysis.workers import Workers
from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.reader import Capture
from megatron.quantscope.capture.record import TensorRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problem:
    """A file that could not be read.

    Attributes:
        file: Its path.
        reason: One line.
    """

    file: Path
    reason: str


@dataclass
class ScanLog:
    """What came of the files of a scan; filled while its rows are drawn.

    Attributes:
        files: Files that were read.
        bytes: Their bytes.
        problems: Those that could not be read.
    """

    files: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)


def distinct_files(capture: Capture) -> list[TensorRecord]:
    """One record a file: the first of those that share it."""
    first: dict[Path, TensorRecord] = {}
    for record in capture.records:
        if record.path not in first or (first[record.path].reference and not record.reference):
            first[record.path] = record
    return list(first.values())


def scan(
    capture: Capture,
    workers: Workers,
    treatments: tuple[Treatment, ...],
    log: ScanLog,
    advance: Callable[[int], None] = lambda size: None,
) -> Iterator[Row]:
    """Read every file of a capture once.

    Args:
        capture: What to read.
        workers: Where to read it.
        treatments: What to try on each tensor.
        log: Filled as the scan goes on.
        advance: Called with the bytes of each file when it is done.

    Yields:
        Rows of the summary table, in the order of the capture's records.
    """
    handle = replace(capture, records=[], problems=[])  # what a worker needs to open files
    measure = partial(measure_file, handle, treatments)
    for record, outcome in workers.map(measure, distinct_files(capture)):
        if isinstance(outcome, Problem):
            logger.warning("%s: %s", outcome.file.name, outcome.reason)
            log.problems.append(outcome)
        else:
            log.files += 1
            log.bytes += record.bytes
            yield outcome
        advance(record.bytes)


def measure_file(
    capture: Capture, treatments: tuple[Treatment, ...], record: TensorRecord
) -> tuple[TensorRecord, Row | Problem]:
    """Read and summarise one file; what can not be read or measured becomes a `Problem`."""
    try:
        record = capture.describe(record)
        tensor = capture.load(record)
        axis = role_of(record.layer_type, record.tensor_name).contraction
        summary = summarize(tensor, axis=axis, treatments=treatments)
    except CaptureError as error:
        return record, Problem(record.path, str(error))
    except (TypeError, RuntimeError, MemoryError) as error:  # a dtype without real values, a file cut while it was read
        return record, Problem(record.path, f"can not be measured: {str(error).partition(chr(10))[0]}")
    known = replace(record, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
    return record, summary_row(known, summary)
