"""`compare`: captures of the same samples, tensor by tensor, the first run being what the others are measured by."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.report.commands.opening import DONE, FAILED, complain, opened, progress_of, workers_of

if TYPE_CHECKING:
    import pandas

    from megatron.quantscope.analysis.comparison import ComparisonLog, Run
    from megatron.quantscope.analysis.study import Study

_TOPIC = "comparisons"


def run(options: argparse.Namespace) -> int:
    """Print the comparison, or write it with its figures; 1 where something could not be compared."""
    from megatron.quantscope.analysis.comparison import runs_of
    from megatron.quantscope.report.comparison_text import comparison_text

    runs = runs_of([opened(options, directory) for directory in options.directories])
    if len(runs) == 1:
        raise CaptureError(f"{options.directories[0]} holds one run, {runs[0].label}: give a second capture to compare")
    table, log = _compared(options, runs)
    if table.empty:
        raise CaptureError(
            f"no tensor of {runs[0].label} has a partner: {log.notes[0] if log.notes else 'none at all'}"
        )
    if options.output_dir is None:
        print(comparison_text(table, log=log, runs=runs), end="")
    else:
        print(_written(options, runs, table, log))
    if log.problems:
        return complain(f"{len(log.problems)} pairs were not compared; the first: {log.problems[0]}", FAILED)
    return DONE


def _compared(options: argparse.Namespace, runs: Sequence[Run]) -> tuple[pandas.DataFrame, ComparisonLog]:
    from megatron.quantscope.analysis.analyse import reading_pool
    from megatron.quantscope.analysis.comparison import ComparisonLog, compare_pairs, pair_runs

    pairing, log = pair_runs(runs), ComparisonLog()
    with (
        reading_pool(workers_of(options), options.dask_scheduler) as pool,
        progress_of(options).step("comparing runs", pairing.bytes, bytes=True) as advance,
    ):
        return compare_pairs(pairing, pool, advance=advance, log=log), log


def _written(options: argparse.Namespace, runs: Sequence[Run], table: pandas.DataFrame, log: ComparisonLog) -> Path:
    """Write the table, the text and the figures.

    Returns:
        The path to open.
    """
    from megatron.quantscope.report.comparison_text import write_comparison
    from megatron.quantscope.report.draw import figures_for
    from megatron.quantscope.report.render import render, tasks_for

    target = Path(options.output_dir)
    text = write_comparison(table, target, log=log, runs=runs)
    study = _study(runs, table)
    tasks = tasks_for(study, [spec for spec in figures_for(quick=False, only=_TOPIC) if not spec.per_type])
    render(study, tasks, target, workers_of(options))
    return text


def _study(runs: Sequence[Run], table: pandas.DataFrame) -> Study:
    """The runs as the figures of a comparison want them: each under its label, without any tensor's summary."""
    import pandas

    from megatron.quantscope.analysis.study import Study

    labels = [each.label for each in runs]
    return Study(
        source=", ".join(dict.fromkeys(str(each.capture.directory) for each in runs)),
        index=pandas.DataFrame({"quant_type": labels}),
        summary=pandas.DataFrame({"quant_type": labels}),
        commits={each.label: each.capture.commits.get(each.quant_type, {}) for each in runs},
        run_info={each.label: each.capture.run_info.get(each.quant_type, {}) for each in runs},
        comparison=table,
    )
