"""The summary row of a tensor of which only statistics were kept (--tensor-save-mode statistics): from its manifest.

Counts, sums, extremes and exponents are there as of any tensor, and the exponents of its blocks where the manifest has
a map of them, which runs along the last dimension: of an operand whose first GEMM sums along another axis they are left
out. What takes the elements themselves - quantiles, channels, errors - is null or empty, and figures of it leave these
rows out.
"""

from __future__ import annotations

from megatron.quantscope.analysis.exponents import ExponentHistogram
from megatron.quantscope.analysis.roles import role_of
from megatron.quantscope.analysis.tables import STATISTICS_COLUMNS, Row, record_row, summary_columns
from megatron.quantscope.capture.record import TensorRecord

_EXPONENT_BIAS = 127  # of the codes in a block map
_ZERO, _NONFINITE = 0, 255
_LAST_AXIS = -1


def manifest_row(record: TensorRecord) -> Row:
    """The row of a record that has no tensor; of dtypes without real values all counts are null."""
    lists: Row = {name: [] for name, kind in summary_columns(()).items() if kind.startswith("list<")}
    row = lists | record_row(record)
    statistics = record.statistics
    if statistics is None:
        return row
    row |= {name: getattr(statistics, name) for name in STATISTICS_COLUMNS}
    exponents = ExponentHistogram.of(statistics.exponents)
    row |= {"exponent_first": exponents.first, "exponent_counts": exponents.counts.tolist()}
    return row | _block_columns(record)


def _block_columns(record: TensorRecord) -> Row:
    counts = (record.blocks or {}).get("counts")
    cut = role_of(record.layer_type, record.tensor_name).cuts[0]
    if counts is None or cut.axis != _LAST_AXIS or cut.heads:
        return {"block_exponent_first": 0}
    codes = {int(code): count for code, count in counts.items()}
    regular = {code - _EXPONENT_BIAS: count for code, count in codes.items() if code not in (_ZERO, _NONFINITE)}
    exponents = ExponentHistogram.of(regular)
    return {
        "block_exponent_first": exponents.first,
        "block_exponent_counts": exponents.counts.tolist(),
        "blocks": sum(codes.values()),
        "zero_blocks": codes.get(_ZERO, 0),
    }
