import numpy as np
import pytest
import torch

from megatron.quantscope.analysis.details import collect_details
from megatron.quantscope.analysis.format_errors import treatments
from megatron.quantscope.analysis.scan import ScanLog, scan
from megatron.quantscope.analysis.tables import (
    RECORD_COLUMNS,
    read_table,
    record_row,
    summary_columns,
    write_table,
)
from megatron.quantscope.analysis.workers import worker_pool
from megatron.quantscope.capture import open_capture
from tests.quantscope.analysis.captures import write_capture


@pytest.fixture(scope="session")
def capture(tmp_path_factory):
    return open_capture(write_capture(tmp_path_factory.mktemp("capture"), layers=3))


@pytest.fixture(scope="session")
def tables(capture, tmp_path_factory):
    """(index, summary, details) of the capture."""
    folder = tmp_path_factory.mktemp("tables")
    tried = treatments(capture.quant_types)
    with worker_pool(1) as workers:
        rows = scan(capture, workers, tried, ScanLog())
        write_table(folder / "summary.parquet", rows, summary_columns(one.name for one in tried))
        write_table(folder / "index.parquet", map(record_row, capture.records), RECORD_COLUMNS)
        summary = read_table(folder / "summary.parquet")
        details = collect_details(summary, workers)
    return read_table(folder / "index.parquet"), summary, details


@pytest.fixture
def rough():
    """A tensor that has everything: outliers, zeros of both signs, tiny and subnormal values, many binades."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(24, 80, generator=generator) * torch.exp2(torch.randint(-30, 12, (24, 80), generator=generator))
    x[0, :32] = 0.0
    x[1, 3], x[1, 4] = 0.0, -0.0
    x[2, :32] *= 2.0**-100
    x[3, :32] = 2.0**-130
    x[4] = torch.linspace(-3, 3, 80)
    x[5, 7] = 3.0e38
    return x


def float64(x):
    return x.double().numpy()


def numpy_error(x, q):
    """(error squares, underflow, lost) by plain numpy in float64."""
    x, q = np.asarray(float64(x)), np.asarray(float64(q))
    finite = np.isfinite(x)
    kept = finite & np.isfinite(q)
    return (
        float(np.square(x[kept] - q[kept]).sum()),
        int(np.count_nonzero(kept & (q == 0) & (x != 0))),
        int(np.count_nonzero(finite & ~kept)),
    )
