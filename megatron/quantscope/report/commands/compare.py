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
    """Print the comparison, or write it with its figures; 1 where something could not be compared or drawn."""
    from megatron.quantscope.analysis.comparison import runs_of
    from megatron.quantscope.analysis.errors import AnalysisError, told_in_one_line
    from megatron.quantscope.report.comparison_text import TEXT, comparison_text

    runs = runs_of([opened(options, directory) for directory in options.directories])
    if len(runs) == 1:
        raise CaptureError(f"{options.directories[0]} holds one run, {runs[0].label}: give a second capture to compare")
    target, failed = Path(options.output_dir) if options.output_dir is not None else None, {}
    try:
        with told_in_one_line(target, workers_of(options)):
            table, log = _compared(options, runs, target)
            if target is not None:
                failed = _written(options, runs, table, log, target)
    except AnalysisError as error:
        return complain(str(error), FAILED)
    if target is None:
        print(comparison_text(table, log=log, runs=runs), end="")
    else:
        print(target / TEXT)
    code = DONE
    if log.problems:
        code = complain(f"{len(log.problems)} pairs were not compared; the first: {log.problems[0]}", FAILED)
    if failed:
        code = complain(f"{len(failed)} figures could not be drawn", FAILED)
    return code


def _compared(
    options: argparse.Namespace, runs: Sequence[Run], target: Path | None
) -> tuple[pandas.DataFrame, ComparisonLog]:
    from megatron.quantscope.analysis.analyse import check_writable, reading_pool
    from megatron.quantscope.analysis.comparison import ComparisonLog, compare_pairs, pair_runs
    from megatron.quantscope.analysis.errors import printable

    if target is not None:
        check_writable(target)
    pairing, log = pair_runs(runs), ComparisonLog()
    with (
        reading_pool(workers_of(options), options.dask_scheduler) as pool,
        progress_of(options).step("comparing runs", pairing.bytes, bytes=True) as advance,
    ):
        table = compare_pairs(pairing, pool, advance=advance, log=log)
    if table.empty:
        found = [*log.problems, *log.notes, "none at all"]
        raise CaptureError(f"no tensor of {runs[0].label} was compared with a partner: {found[0]}")
    log.problems = [printable(problem) for problem in log.problems]
    return table, log


def _written(
    options: argparse.Namespace, runs: Sequence[Run], table: pandas.DataFrame, log: ComparisonLog, target: Path
) -> dict[Path, str]:
    """Write the table, the text and the figures.

    Returns:
        The figures that could not be drawn, and why.
    """
    from megatron.quantscope.report.comparison_text import write_comparison
    from megatron.quantscope.report.draw import figures_for
    from megatron.quantscope.report.render import render, tasks_for

    write_comparison(table, target, log=log, runs=runs)
    study = _study(runs, table)
    tasks = tasks_for(study, [spec for spec in figures_for(quick=False, only=_TOPIC) if not spec.per_type])
    return render(study, tasks, target, workers_of(options)).failed


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
