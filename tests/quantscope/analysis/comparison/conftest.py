import pytest

from megatron.quantscope.analysis.comparison import ComparisonLog, compare, runs_of
from megatron.quantscope.analysis.workers import worker_pool
from megatron.quantscope.capture import open_capture


@pytest.fixture
def compared():
    """`compared(directory, ...)` -> (table, log) of all their runs, in this process."""

    def run(*directories):
        log = ComparisonLog()
        with worker_pool(1) as workers:
            table = compare(runs_of([open_capture(directory) for directory in directories]), workers, log=log)
        return table, log

    return run
