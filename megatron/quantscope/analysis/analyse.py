"""The analysis of a capture, from its files to a `Study`: what every figure, page and sub-command starts from.

    scan        every tensor once, in a pool of workers or on a Dask cluster; what is known already is not read again
    tables      OUT/index.parquet and OUT/summary.parquet
    details     a second look at the few tensors that the summaries point to
    comparison  the runs of other types against the baseline's, tensor by tensor; kept in OUT/comparison.parquet
    findings    what stands out, in words

Nothing here draws.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron.quantscope.analysis.details import collect_details
from megatron.quantscope.analysis.errors import AnalysisError, printable, told_in_one_line
from megatron.quantscope.analysis.format_errors import Treatment, treatments
from megatron.quantscope.analysis.identity import key_of
from megatron.quantscope.analysis.resume import SUMMARY_TABLE, RowStore
from megatron.quantscope.analysis.scan import Problem, ScanLog, distinct_records, scan
from megatron.quantscope.analysis.stored_lists import read_summary
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.analysis.tables import RECORD_COLUMNS, read_table, record_row, write_table
from megatron.quantscope.analysis.workers import Workers, start_server, worker_pool
from megatron.quantscope.capture.reader import Capture
from megatron.quantscope.capture.record import TensorRecord

if TYPE_CHECKING:
    import pandas

    from megatron.quantscope.analysis.findings import Finding

__all__ = ["INDEX_TABLE", "AnalysisError", "Progress", "analyse", "check_writable", "reading_pool", "told_in_one_line"]

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
    comparison: bool = True,
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
        comparison: Whether runs are compared if it takes reading them; one that is known is part of the details.

    Raises:
        AnalysisError: Files, workers or the scheduler fail, no tensor can be read, or there is no format of a name.
    """
    with told_in_one_line(target, workers):
        if scheduler is None:
            start_server(workers)
        tried = _treatments(capture, formats)
        check_writable(target)
        capture, unnamed = _named_in_utf8(capture)
        with reading_pool(workers, scheduler) as pool:
            log = _write_tables(capture, target, pool, tried, progress, unnamed, restricted=bool(selection or formats))
            study = _study(capture, target, tried, log, selection)
            if details:
                study = _with_details(study, capture, target, pool, progress, compare=comparison)
        return replace(study, findings=_findings(study))


def _study(capture: Capture, target: Path, tried: Sequence[Treatment], log: ScanLog, selection: str) -> Study:
    """What the tables say, and what the runs said of themselves."""
    problems = [f"{problem.file.name}: {problem.reason}" for problem in log.problems]
    return Study(
        source=str(capture.directory),
        index=read_table(target / INDEX_TABLE),
        summary=read_summary(target / SUMMARY_TABLE, [one.name for one in tried]),
        commits=capture.commits,
        run_info=capture.run_info,
        problems=[printable(problem) for problem in capture.problems + problems],
        selection=selection,
        scan=replace(log, problems=[]),
    )


def _with_details(
    study: Study, capture: Capture, target: Path, pool: Workers, progress: Progress, *, compare: bool
) -> Study:
    """With a second look at some tensors, and the runs side by side."""
    with progress.step("looking at details", None):
        views: dict[str, Any] = collect_details(study.summary, pool)
    table, problems = _compared(capture, target, pool, progress, compare=compare)
    told = {problem.partition(": ")[0] for problem in study.problems}
    fresh = [line for line in map(printable, problems) if not any(name in line for name in told)]
    return replace(study, comparison=table, problems=study.problems + fresh, **views)


def _named_in_utf8(capture: Capture) -> tuple[Capture, list[Problem]]:
    """The capture without files whose names no table can hold, and a line for each of these."""
    kept, unnamed = [], {}
    for record in capture.records:
        path = record.path
        if path is None or printable(str(path)) == str(path):
            kept.append(record)
        else:
            unnamed[path] = Problem(path, "its name is not UTF-8, which tables are written in: rename it")
    return replace(capture, records=kept), list(unnamed.values())


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
    unnamed: Sequence[Problem],
    *,
    restricted: bool,
) -> ScanLog:
    records, log = distinct_records(capture), ScanLog(problems=list(unnamed))
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


def _compared(
    capture: Capture, target: Path, pool: Workers, progress: Progress, *, compare: bool
) -> tuple[pandas.DataFrame | None, list[str]]:
    """The runs of the capture against the baseline, and what could not be compared; as kept, if nothing has changed."""
    from megatron.quantscope.analysis.comparison import ComparisonLog, compare_pairs, pair_runs, runs_of
    from megatron.quantscope.analysis.kept_comparison import digest_of, keep_comparison, kept_comparison

    runs, log = runs_of([capture]), ComparisonLog()
    if len(runs) == 1:
        return None, []
    pairing = pair_runs(runs)
    digest = digest_of(pairing)
    table = kept_comparison(target, digest)
    if table is None and compare:
        with progress.step("comparing runs", pairing.bytes, bytes=True) as advance:
            table = compare_pairs(pairing, pool, advance=advance, log=log)
        keep_comparison(target, table, None if log.problems else digest)
    return table, log.problems


def _findings(study: Study) -> list[Finding]:
    from megatron.quantscope.analysis.findings import find

    return find(study)
