"""The analysis of a capture, from its files to a `Study`: what every figure, page and sub-command starts from.

    scan        every tensor once, in a pool of workers or on a Dask cluster; what is known already is not read again
    tables      OUT/index.parquet and OUT/summary.parquet
    details     a second look at the few tensors that the summaries point to
    comparison  the runs of other types against the baseline's, tensor by tensor
    findings    what stands out, in words

Nothing here draws.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron.quantscope.analysis.details import collect_details
from megatron.quantscope.analysis.errors import AnalysisError
from megatron.quantscope.analysis.format_errors import Treatment, treatments
from megatron.quantscope.analysis.identity import key_of
from megatron.quantscope.analysis.resume import SUMMARY_TABLE, RowStore
from megatron.quantscope.analysis.scan import ScanLog, distinct_records, scan
from megatron.quantscope.analysis.stored_lists import read_summary
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.analysis.tables import RECORD_COLUMNS, read_table, record_row, write_table
from megatron.quantscope.analysis.workers import Workers, start_server, worker_pool
from megatron.quantscope.capture.reader import Capture
from megatron.quantscope.capture.record import TensorRecord

if TYPE_CHECKING:
    import pandas

    from megatron.quantscope.analysis.findings import Finding

__all__ = ["INDEX_TABLE", "AnalysisError", "Progress", "analyse", "check_writable", "reading_pool"]

INDEX_TABLE = "index.parquet"


class Progress(Protocol):
    """Who is told how far it is."""

    def step(
        self, title: str, total: int | None, *, bytes: bool = False
    ) -> AbstractContextManager[Callable[[int], None]]:
        """One step of `total` parts, or bytes; gives what is called with how much further it is."""
        ...


def analyse(
    capture: Capture,
    target: Path,
    workers: int,
    progress: Progress,
    formats: Sequence[str] | None = None,
    scheduler: str | None = None,
    *,
    selection: str = "",
    details: bool = True,
) -> Study:
    """Analyse a capture.

    Args:
        capture: What `open_capture` gave, or a part of it.
        target: Where the tables go; made if it is not there.
        workers: How many processes.
        progress: Told how far it is.
        formats: Which formats to try beside the capture's own; None: all.
        scheduler: The address of a Dask scheduler whose workers read instead; see `dask_workers`.
        selection: In words, which part of a capture this is; empty: all of it.
        details: Whether to look at tensors again and to compare runs, beyond the tables.

    Raises:
        AnalysisError: The target can not be written, no tensor can be read, a worker was killed, there is no format of
            a name, or no scheduler answers.
    """
    if scheduler is None:
        start_server(workers)
    with _told_in_one_line(target, workers):
        tried = _treatments(capture, formats)
        check_writable(target)
        with reading_pool(workers, scheduler) as pool:
            log = _write_tables(capture, target, pool, tried, progress, restricted=bool(selection or formats))
            summary = read_summary(target / SUMMARY_TABLE, [one.name for one in tried])
            problems = [f"{problem.file.name}: {problem.reason}" for problem in log.problems]
            looked_at: dict[str, Any] = {}
            if details:
                with progress.step("looking at details", None):
                    looked_at |= collect_details(summary, pool)
                looked_at["comparison"] = _compared(capture, pool, progress, problems)
    study = Study(
        source=str(capture.directory),
        index=read_table(target / INDEX_TABLE),
        summary=summary,
        commits=capture.commits,
        run_info=capture.run_info,
        problems=capture.problems + problems,
        selection=selection,
        scan=replace(log, problems=[]),
        **looked_at,
    )
    return replace(study, findings=_findings(study))


@contextmanager
def _told_in_one_line(target: Path, workers: int) -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        raise AnalysisError(f"a worker was killed, most likely for want of memory: try fewer than {workers}") from None
    except OSError as error:
        raise AnalysisError(f"can not write {error.filename or target}: {error.strerror or error}") from error


def check_writable(target: Path) -> None:
    """Find out before the work, not after it.

    Raises:
        OSError: The directory can not be made, or no file in it.
    """
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=target):
        pass


def reading_pool(workers: int, scheduler: str | None) -> AbstractContextManager[Workers]:
    """Where tensors are read: `workers` processes, or the Dask cluster of this scheduler.

    Entering it raises an AnalysisError where no scheduler answers.
    """
    if scheduler is None:
        return worker_pool(workers)
    from megatron.quantscope.analysis.dask_workers import dask_pool

    return dask_pool(scheduler)


def _treatments(capture: Capture, formats: Sequence[str] | None) -> tuple[Treatment, ...]:
    try:
        return treatments(capture.quant_types, formats=formats)
    except ValueError as error:
        raise AnalysisError(str(error)) from error


def _write_tables(
    capture: Capture,
    target: Path,
    pool: Workers,
    tried: tuple[Treatment, ...],
    progress: Progress,
    *,
    restricted: bool,
) -> ScanLog:
    records, log = distinct_records(capture), ScanLog()
    keys = [key_of(record) for record in records]
    with RowStore(target, tried, restricted=restricted) as store:
        left = list(zip(records, keys, strict=True))
        while pending := _first_of_each(left, store):
            size = sum(record.bytes for record in pending)
            with progress.step("reading tensors", size, bytes=True) as advance:
                for row in scan(capture, pool, tried, log, advance, pending):
                    store.add(row)
            store.flush()
            done = set(map(id, pending))
            left = [pair for pair in left if id(pair[0]) not in done]
        written = store.gather(records, keys)
    if not written:
        files, reason = len(log.problems), log.problems[0].reason
        raise AnalysisError(f"none of the {files} files in {capture.directory} can be read: {reason}")
    log.reused = written - log.files - log.without_tensor
    write_table(target / INDEX_TABLE, map(record_row, capture.records), RECORD_COLUMNS)
    return log


def _first_of_each(left: Sequence[tuple[TensorRecord, str | None]], store: RowStore) -> list[TensorRecord]:
    """Of the records whose key no row has the first one a key: the others have its bytes, and wait for its row.

    They have their turn when it could not be read.
    """
    first: dict[object, TensorRecord] = {}
    for record, key in left:
        if key not in store:
            first.setdefault(id(record) if key is None else key, record)
    return list(first.values())


def _compared(capture: Capture, pool: Workers, progress: Progress, problems: list[str]) -> pandas.DataFrame | None:
    """The runs of the capture against the baseline; what the scan has not told of is added to `problems`."""
    from megatron.quantscope.analysis.comparison import ComparisonLog, compare_pairs, pair_runs, runs_of

    runs, log = runs_of([capture]), ComparisonLog()
    if len(runs) == 1:
        return None
    pairing = pair_runs(runs)
    with progress.step("comparing runs", pairing.bytes, bytes=True) as advance:
        table = compare_pairs(pairing, pool, advance=advance, log=log)
    told = {problem.partition(": ")[0] for problem in problems}
    problems += [line for line in log.problems if not any(name in line for name in told)]
    return table


def _findings(study: Study) -> list[Finding]:
    from megatron.quantscope.analysis.findings import find

    return find(study)
