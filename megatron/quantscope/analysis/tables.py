"""The two tables of an analysis, as Parquet files that pandas opens without this package.

    index.parquet     a row a captured row: every field that identifies it, and the file that holds it
    summary.parquet   a row a tensor that was read: the same fields, and its `summary.TensorSummary`

`offset` says where in a segment a tensor lies; it is null for a file of one tensor (`location_of` reads both).
`trained_as` names the treatment that the run itself used on an operand, in the first GEMM that had it quantised.

A treatment `mxfp8` has the columns `mxfp8.sqnr_db`, `mxfp8.error_squares`, `mxfp8.underflow`, `mxfp8.saturated`,
`mxfp8.lost` (elements) and `mxfp8.dead_blocks`; all but the first add up over rows. Those of `mxfp8@2` are null where a
tensor goes into one GEMM only; `gemms` names them in the order of the uses. A histogram has its first exponent and its
counts in two columns. `block_exponent_*` is that of the amax of blocks along the first use, `block2_*` along the
second; `block_fraction_counts` holds the same blocks by exponent and fraction of amax, [exponents, 4] row by row
(`formats.blocks`). `live_blocks_16@2` are the blocks of 16 along the second use that hold anything but zeros:
`live_column` names the one of these columns that a treatment's dead blocks are a part of. The column `quantiles`
belongs to the levels `distribution.QUANTILE_LEVELS`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.quantscope.analysis.blocks import BlockSummary
from megatron.quantscope.analysis.exponents import ExponentHistogram
from megatron.quantscope.analysis.format_errors import USE_SUFFIXES, FormatError, Treatment
from megatron.quantscope.analysis.identity import KEY
from megatron.quantscope.analysis.replaced_files import replaced
from megatron.quantscope.analysis.roles import module_label, role_of
from megatron.quantscope.analysis.summary import TensorSummary
from megatron.quantscope.analysis.trained_as import TRAINED_AS, trained_as
from megatron.quantscope.capture.location import Location
from megatron.quantscope.formats.catalog import MX_BLOCK

if TYPE_CHECKING:
    import pandas
    import pyarrow

    from megatron.quantscope.capture import TensorRecord

Row = dict[str, Any]

_TEXT, _INT, _FLOAT, _BOOL = "string", "int64", "float64", "bool"
_TEXTS, _INTS, _FLOATS, _FLOAT32S = "list<string>", "list<int64>", "list<float64>", "list<float32>"
_GROUP_ROWS = 4096  # rows that are held before they go to disk

RECORD_COLUMNS: Mapping[str, str] = {
    "file": _TEXT,
    "offset": _INT,
    "bytes": _INT,
    "reference": _BOOL,
    "quant_type": _TEXT,
    "run_id": _TEXT,
    "iteration": _INT,
    "micro_batch": _INT,
    "rank": _INT,
    "tp_rank": _INT,
    "dp_rank": _INT,
    "counter": _INT,
    "sample_idx": _INT,
    "layer_type": _TEXT,
    "layer_idx": _INT,
    "module": _TEXT,
    "component": _TEXT,
    "operation": _TEXT,
    "phase": _TEXT,
    "tensor_name": _TEXT,
    "gemm": _TEXT,
    "gemms": _TEXTS,
    "stage": _TEXT,
    "shard": _TEXT,
    "shape": _INTS,
    "dtype": _TEXT,
    "head_dim": _INT,
    "softmax_scale": _FLOAT,
    "site": _TEXT,
    "symbol": _TEXT,
    "family": _TEXT,
    "operand": _BOOL,
    TRAINED_AS: _TEXT,
}
STATISTICS_COLUMNS: Mapping[str, str] = {
    "count": _INT,
    "zero": _INT,
    "nan": _INT,
    "inf": _INT,
    "min": _FLOAT,
    "max": _FLOAT,
    "amax": _FLOAT,
    "mean": _FLOAT,
    "rms": _FLOAT,
    "std": _FLOAT,
    "sum": _FLOAT,
    "sum_squares": _FLOAT,
}
DISTRIBUTION_COLUMNS: Mapping[str, str] = {
    "median_magnitude": _FLOAT,
    "kurtosis": _FLOAT,
    "top": _FLOATS,
    "quantiles": _FLOATS,
    "channel_amax": _FLOAT32S,
}
BLOCK_PREFIXES = ("block", "block2")  # by use
HISTOGRAM_COLUMNS: Mapping[str, str] = {
    "exponent_first": _INT,
    "exponent_counts": _INTS,
    "blocks": _INT,
    "zero_blocks": _INT,
    "block_exponent_first": _INT,
    "block_exponent_counts": _INTS,
    "block_fraction_counts": _INTS,
    "block2_exponent_first": _INT,
    "block2_exponent_counts": _INTS,
    "block2_fraction_counts": _INTS,
    "block_depths": _INTS,
}
ERROR_FIELDS = tuple(field.name for field in fields(FormatError))


def error_columns(treatments: Iterable[str]) -> dict[str, str]:
    """The columns of these treatments and their types."""
    columns = {}
    for name in treatments:
        columns[f"{name}.sqnr_db"] = _FLOAT
        columns |= {f"{name}.{field}": _FLOAT if field == "error_squares" else _INT for field in ERROR_FIELDS}
        columns[live_column(name)] = _INT
    return columns


def live_column(treatment: str) -> str:
    """The column of what a treatment's dead blocks are a part of: formats without blocks are looked at in 32."""
    tried = Treatment.named(treatment)
    return _live_column(tried.record.block or MX_BLOCK, tried.use)


def _live_column(size: int, use: int) -> str:
    return f"live_blocks_{size}{USE_SUFFIXES[use]}"


def summary_columns(treatments: Iterable[str]) -> dict[str, str]:
    """All columns of summary.parquet and their types."""
    own = {**RECORD_COLUMNS, KEY: _TEXT, **STATISTICS_COLUMNS, **DISTRIBUTION_COLUMNS, **HISTOGRAM_COLUMNS}
    return own | error_columns(treatments)


def record_row(record: TensorRecord) -> Row:
    """The fields of `RECORD_COLUMNS` of a captured row."""
    role = role_of(record.layer_type, record.tensor_name)
    derived = {
        "file": None if record.path is None else str(record.path),
        "site": f"{module_label(record.module, record.layer_type)}.{role.symbol}",
        "symbol": role.symbol,
        "family": role.family,
        "operand": role.operand,
        TRAINED_AS: trained_as(record),
        "gemms": [use.gemm for use in role.uses],
        "tp_rank": record.parallel.get("tp_rank"),
        "dp_rank": record.parallel.get("dp_rank"),
        "shard": json.dumps([dict(split) for split in record.shard]) if record.shard or not record.bare else None,
        "shape": None if record.shape is None else list(record.shape),
    }
    return {name: derived[name] if name in derived else getattr(record, name) for name in RECORD_COLUMNS}


def location_of(row: Mapping[str, Any] | pandas.Series) -> Location:
    """Where the tensor of a row of one of the tables lies."""
    path, offset = Path(row["file"]), row["offset"]
    if offset is None or offset != offset:  # null
        return Location(path)
    return Location(path, int(offset), tuple(int(size) for size in row["shape"]), row["dtype"])


def summary_row(record: TensorRecord, summary: TensorSummary) -> Row:
    """The row of summary.parquet of one tensor."""
    statistics, distribution = summary.statistics, summary.distribution
    exponents = ExponentHistogram.of(statistics.exponents)
    row = record_row(record) | {name: getattr(statistics, name) for name in STATISTICS_COLUMNS}
    row |= {
        "median_magnitude": distribution.median_magnitude,
        "kurtosis": distribution.kurtosis,
        "top": list(distribution.top),
        "quantiles": list(distribution.quantiles),
        "channel_amax": summary.channel_amax.tolist(),
        "exponent_first": exponents.first,
        "exponent_counts": exponents.counts.tolist(),
    }
    row |= _block_columns(summary.blocks)
    for name, error in summary.errors.items():
        row[f"{name}.sqnr_db"] = error.sqnr_db(statistics.sum_squares)
        row |= {f"{name}.{field}": getattr(error, field) for field in ERROR_FIELDS}
    return row


def _block_columns(by_use: Sequence[BlockSummary]) -> Row:
    """What is known of the blocks along each use; empty histograms where there is none."""
    first = by_use[0] if by_use else None
    row: Row = {
        "blocks": first.total if first else 0,
        "zero_blocks": first.zero if first else 0,
        "block_depths": first.depths.tolist() if first and first.depths is not None else [],
    }
    for prefix, blocks in zip_longest(BLOCK_PREFIXES, by_use):
        row[f"{prefix}_exponent_first"] = blocks.first if blocks else 0
        row[f"{prefix}_exponent_counts"] = blocks.amax.sum(axis=1).tolist() if blocks else []
        row[f"{prefix}_fraction_counts"] = blocks.amax.ravel().tolist() if blocks else []
    for use, blocks in enumerate(by_use):
        row |= {_live_column(size, use): count for size, count in blocks.live.items()}
    return row


def write_table(path: Path, rows: Iterable[Row], columns: Mapping[str, str]) -> int:
    """Write rows to a Parquet file, a few thousand at a time; the file is complete or absent.

    Returns:
        How many rows.
    """
    import pyarrow.parquet

    schema = pyarrow.schema([(name, _arrow_type(kind)) for name, kind in columns.items()])
    written = 0
    with replaced(path) as temporary, pyarrow.parquet.ParquetWriter(temporary, schema) as writer:
        for group in _groups(iter(rows)):
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
            written += len(group)
    return written


def read_table(path: Path) -> pandas.DataFrame:
    """A table that `write_table` wrote."""
    import pandas

    return pandas.read_parquet(path)


def _groups(rows: Iterator[Row]) -> Iterator[Sequence[Row]]:
    while group := list(islice(rows, _GROUP_ROWS)):
        yield group


def _arrow_type(kind: str) -> pyarrow.DataType:
    import pyarrow

    if kind.startswith("list<"):
        return pyarrow.list_(_arrow_type(kind[len("list<") : -1]))
    return pyarrow.bool_() if kind == _BOOL else pyarrow.type_for_alias(kind)
