"""The whole way of drawing: read every tensor of a capture once, write tables, texts and figures."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from megatron.quantscope.analysis.details import collect_details
from megatron.quantscope.analysis.format_errors import treatments
from megatron.quantscope.analysis.scan import ScanLog, distinct_tensors, scan
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.analysis.tables import RECORD_COLUMNS, read_table, record_row, summary_columns, write_table
from megatron.quantscope.analysis.workers import Workers, worker_pool
from megatron.quantscope.capture.reader import Capture
from megatron.quantscope.report.figures import FIGURES, QUICK, FigureSpec
from megatron.quantscope.report.progress import Progress
from megatron.quantscope.report.render import Rendered, render, tasks_for
from megatron.quantscope.report.text import write_texts

logger = logging.getLogger(__name__)

INDEX_TABLE, SUMMARY_TABLE = "index.parquet", "summary.parquet"


class DrawError(Exception):
    """Drawing can not go on; the message is one line for the user."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What was drawn.

    Attributes:
        open_first: The path to open.
        files: Tensor files that were read.
        bytes: Their bytes.
        figures: What became of the figures.
        problems: One line for everything that could not be read.
    """

    open_first: Path
    files: int
    bytes: int
    figures: Rendered
    problems: list[str]


def figures_for(*, quick: bool, only: str | None) -> tuple[FigureSpec, ...]:
    """The figures that a call asks for: all, the quick one, or those of one topic."""
    if quick:
        return (QUICK,)
    return tuple(spec for spec in FIGURES if only in (None, spec.topic))


def draw(
    capture: Capture,
    output: str | os.PathLike[str],
    *,
    workers: int,
    figures: Sequence[FigureSpec],
    progress: Progress,
) -> Drawn:
    """Analyse a capture and draw it.

    Args:
        capture: What `open_capture` gave.
        output: Where tables, texts and figures go; made if it is not there.
        workers: How many processes.
        figures: Which figures.
        progress: Told how far it is.

    Raises:
        DrawError: The output can not be written, no tensor can be read, or a worker was killed.
    """
    target = Path(output)
    try:
        _check_writable(target)
        study, log = _analyse(capture, target, workers, figures, progress)
        write_texts(study, target)
        tasks = tasks_for(study, figures)
        with progress.step("drawing figures", len(tasks)) as advance:
            rendered = render(study, tasks, target, workers, lambda: advance(1))
    except BrokenProcessPool:
        raise DrawError(f"a worker was killed, most likely for want of memory: try fewer than {workers}") from None
    except OSError as error:
        raise DrawError(f"can not write {error.filename or target}: {error.strerror or error}") from error
    first = target / rendered.written[0] if rendered.written else target
    return Drawn(open_first=first, files=log.files, bytes=log.bytes, figures=rendered, problems=study.problems)


def _analyse(
    capture: Capture, target: Path, workers: int, figures: Sequence[FigureSpec], progress: Progress
) -> tuple[Study, ScanLog]:
    """Read every file once, write the two tables, and look again at the few tensors that figures show in detail."""
    log = ScanLog()
    with worker_pool(workers) as pool:
        _write_tables(capture, target, pool, log, progress)
        summary = read_table(target / SUMMARY_TABLE)
        with progress.step("looking at details", None):
            details = collect_details(summary, pool) if any(spec is not QUICK for spec in figures) else {}
    study = Study(
        source=str(capture.directory),
        index=read_table(target / INDEX_TABLE),
        summary=summary,
        commits=capture.commits,
        run_info=capture.run_info,
        problems=capture.problems + [f"{problem.file.name}: {problem.reason}" for problem in log.problems],
        **details,
    )
    return study, log


def _write_tables(capture: Capture, target: Path, pool: Workers, log: ScanLog, progress: Progress) -> None:
    tried = treatments(capture.quant_types)
    size = sum(record.bytes for record in distinct_tensors(capture))
    with progress.step("reading tensors", size, bytes=True) as advance:
        rows = scan(capture, pool, tried, log, advance)
        written = write_table(target / SUMMARY_TABLE, rows, summary_columns(one.name for one in tried))
    if not written:
        (target / SUMMARY_TABLE).unlink()
        failed = log.problems[0]
        raise DrawError(f"none of the {len(log.problems)} files in {capture.directory} can be read: {failed.reason}")
    write_table(target / INDEX_TABLE, map(record_row, capture.records), RECORD_COLUMNS)


def _check_writable(target: Path) -> None:
    """Find out before the work, not after it."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=target):
        pass
