import logging

import pytest

from megatron.quantscope.analysis.comparison import compare, runs_of
from megatron.quantscope.analysis.details import collect_details
from megatron.quantscope.analysis.format_errors import treatments
from megatron.quantscope.analysis.scan import ScanLog, scan
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.analysis.tables import RECORD_COLUMNS, read_table, record_row, summary_columns, write_table
from megatron.quantscope.analysis.workers import worker_pool
from megatron.quantscope.capture import open_capture
from tests.quantscope.analysis.captures import write_capture

logging.getLogger("matplotlib").setLevel(logging.ERROR)


@pytest.fixture(scope="session")
def study_of(tmp_path_factory):
    """Analyse a capture directory in this process."""

    def analyse(directory):
        capture, folder = open_capture(directory), tmp_path_factory.mktemp("tables")
        tried = treatments(capture.quant_types)
        with worker_pool(1) as workers:
            rows = scan(capture, workers, tried, ScanLog())
            write_table(folder / "summary.parquet", rows, summary_columns(one.name for one in tried))
            write_table(folder / "index.parquet", map(record_row, capture.records), RECORD_COLUMNS)
            summary = read_table(folder / "summary.parquet")
            details = collect_details(summary, workers)
            comparison = compare(runs_of([capture]), workers)
        return Study(
            source=str(directory),
            index=read_table(folder / "index.parquet"),
            summary=summary,
            commits=capture.commits,
            run_info=capture.run_info,
            problems=capture.problems,
            comparison=None if comparison.empty else comparison,
            **details,
        )

    return analyse


@pytest.fixture(scope="session")
def small_study(study_of, tmp_path_factory):
    """One type, one rank, one micro-batch."""
    return study_of(write_capture(tmp_path_factory.mktemp("small"), layers=3))


@pytest.fixture(scope="session")
def wide_study(study_of, tmp_path_factory):
    """Two types, two ranks, two iterations of two micro-batches."""
    directory = tmp_path_factory.mktemp("wide")
    many = {"layers": 2, "ranks": 2, "iterations": 2, "micro_batches": 2}
    write_capture(directory, "bf16", **many)
    write_capture(directory, "hifp8", spoil=lambda module, layer, name, tensor: tensor * 1.25, **many)
    return study_of(directory)
