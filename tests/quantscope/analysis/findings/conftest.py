"""Studies of hand-made tables: a small model whose numbers are those of Gaussian data, and faults planted in it.

What identifies a row comes from `record_row`, as in an analysis; only what would be measured is made up.
"""

from pathlib import Path

import numpy as np
import pandas
import pytest

from megatron.quantscope.analysis.findings.reference import gaussian
from megatron.quantscope.analysis.format_errors import treatments
from megatron.quantscope.analysis.scan import ScanLog, scan
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.analysis.tables import (
    RECORD_COLUMNS,
    live_column,
    read_table,
    record_row,
    summary_columns,
    write_table,
)
from megatron.quantscope.analysis.workers import worker_pool
from megatron.quantscope.capture import TensorRecord, open_capture

LAYERS, WIDTH, COUNT = 8, 64, 64 * 1024
NOISE = {"fp16": 1e-7, "hifp8": 5e-4, "fp8_e4m3": 7e-4, "mxfp8": 7e-4, "mxfp4": 1.3e-2, "nvfp4": 9e-3}  # of unit signal
SITES = {
    "fc1.x": ("input", "forward", "pre"),
    "fc1.w": ("weight", "forward", "pre"),
    "fc1.y": ("output", "forward", "post"),
    "fc1.dy": ("grad_output", "backward", "pre"),
}


def _record(quant_type, ranks, rank, layer, site, counter):
    tensor_name, operation, phase = SITES[site]
    return TensorRecord(
        quant_type=quant_type, run_id="r", iteration=0, micro_batch=0, rank=rank, sample_idx=rank,
        sample_indices=(rank,), layer_type="linear", layer_idx=layer, tensor_name=tensor_name, operation=operation,
        phase=phase, module=f"decoder.layers.{layer}.mlp.linear_fc1", component="linear", stage="complete",
        shape=(1024, 1, WIDTH), dtype="bfloat16", path=Path(quant_type, f"{rank}_{counter}.pt"), bytes=2 * COUNT,
        run_folder=Path("run"), counter=counter,
        parallel={"tp_rank": 0, "tp_size": 1, "dp_rank": rank, "dp_size": ranks},
    )  # fmt: skip


def _row(record):
    row = record_row(record) | {
        "count": COUNT, "zero": 0, "nan": 0, "inf": 0, "min": -4.2, "max": 4.2, "amax": 4.2,
        "mean": 0.0, "sum": 0.0, "rms": 1.0, "std": 1.0, "sum_squares": float(COUNT), "median_magnitude": 0.67,
        "kurtosis": 3.0, "top": [4.2, 4.1, 4.0], "channel_amax": np.linspace(3.0, 4.2, WIDTH).astype("f4"),
        "blocks": COUNT // 32, "zero_blocks": 0,
    }  # fmt: skip
    for name, noise in NOISE.items():
        found = gaussian(name)
        for treatment in [name, f"{name}@2"] if name in ("mxfp8", "mxfp4", "nvfp4") else [name]:
            row[f"{treatment}.error_squares"] = noise * COUNT
            row[f"{treatment}.underflow"] = round(found.underflow_percent * COUNT / 100)
            row[f"{treatment}.saturated"] = round(found.saturated_percent * COUNT / 100)
            row[f"{treatment}.lost"] = 0
            row[f"{treatment}.dead_blocks"] = 0
            row[f"{treatment}.sqnr_db"] = -10 * np.log10(noise)
            row[live_column(treatment)] = COUNT // (16 if name == "nvfp4" else 32)
    for name in ("fp16", "hifp8"):
        row |= {f"{name}_pow2.{part}": row[f"{name}.{part}"] for part in _PARTS}
    return row


_PARTS = ("error_squares", "underflow", "saturated", "lost", "dead_blocks", "sqnr_db")


@pytest.fixture
def table():
    """`table(*types, ranks=1)`: a summary without a fault; weights are the same on every rank."""

    def make(*types, ranks=1):
        rows = []
        for quant_type in types or ("bf16",):
            for rank in range(ranks):
                counter = 0
                for layer in range(LAYERS):
                    for site in SITES:
                        counter += 1
                        rows.append(_row(_record(quant_type, ranks, rank, layer, site, counter)))
        return pandas.DataFrame(rows)

    return make


@pytest.fixture
def study_with():
    """A study of a summary, with further fields."""

    def make(summary, **fields):
        return Study(source="here", index=summary, summary=summary, **fields)

    return make


@pytest.fixture
def analysed(tmp_path):
    """The study of a capture on disk, its tables written and read as by an analysis."""

    def analyse(directory, formats=("mxfp8",)):
        capture = open_capture(directory)
        tried = treatments(formats=formats)
        with worker_pool(1) as workers:
            rows = scan(capture, workers, tried, ScanLog())
            write_table(tmp_path / "summary.parquet", rows, summary_columns(one.name for one in tried))
        write_table(tmp_path / "index.parquet", map(record_row, capture.records), RECORD_COLUMNS)
        index, summary = (read_table(tmp_path / f"{name}.parquet") for name in ("index", "summary"))
        return Study(source=str(directory), index=index, summary=summary)

    return analyse


def at(summary, site, layer=None, rank=None):
    """The rows of a site, as a mask."""
    mask = summary["site"] == site
    if layer is not None:
        mask &= summary["layer_idx"] == layer
    return mask if rank is None else mask & (summary["rank"] == rank)


@pytest.fixture
def plant():
    """`plant(summary, site, layer, rank=None, **columns)`: set columns of some rows (`__` in a name is a dot)."""

    def change(summary, site, layer=None, rank=None, **columns):
        for name, value in columns.items():
            rows = summary.index[at(summary, site, layer, rank)]
            column = name.replace("__", ".")
            if isinstance(value, list | np.ndarray):
                for row in rows:
                    summary.at[row, column] = value
            else:
                summary.loc[rows, column] = value
        return summary

    return change
