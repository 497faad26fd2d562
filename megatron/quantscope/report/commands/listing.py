"""`list`: one line a captured row, from the manifests alone; no tensor is opened."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from megatron.quantscope.analysis.roles import module_label, role_of
from megatron.quantscope.columns import aligned
from megatron.quantscope.report import numbers
from megatron.quantscope.report.commands.opening import DONE, opened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron.quantscope.capture import Capture
    from megatron.quantscope.capture.record import TensorRecord

_HEADS = ("type", "iteration", "micro-batch", "rank", "layer", "tensor", "phase", "shape", "dtype", "amax", "file")
_NUMBERS = (*range(1, 5), _HEADS.index("amax"))  # columns that are flush right


def run(options: argparse.Namespace) -> int:
    """List what the filters let through, and what it adds up to."""
    capture = opened(options, options.directory)
    if options.csv:
        capture.frame().to_csv(sys.stdout, index=False)
        return DONE
    print(aligned([_HEADS, *map(_line, capture.records)], right=_NUMBERS))
    print(_sum(capture))
    return DONE


def _line(record: TensorRecord) -> Sequence[str]:
    symbol = role_of(record.layer_type, record.tensor_name).symbol
    amax = record.statistics.amax if record.statistics is not None else None
    return (
        record.quant_type,
        _number(record.iteration),
        _number(record.micro_batch),
        _number(record.rank),
        _number(record.layer_idx),
        f"{module_label(record.module, record.layer_type)}.{symbol}",
        f"{record.operation} {record.phase}",
        "x".join(map(str, record.shape)) if record.shape is not None else "-",
        record.dtype or "-",
        numbers.magnitude(amax),
        _place(record),
    )


def _sum(capture: Capture) -> str:
    kept = {record.location: record.bytes for record in capture.records if record.location is not None}
    runs = ", ".join(f"{name} {info['run_id']}" for name, info in sorted(capture.run_info.items()) if "run_id" in info)
    total = f"{len(capture.records):,} rows, {len(kept):,} tensors of {numbers.size(sum(kept.values()))}"
    return f"{total}; runs: {runs}" if runs else f"{total}; no run records"


def _place(record: TensorRecord) -> str:
    if record.path is None:
        return "(statistics only)"
    name = record.path.name + ("" if record.offset is None else f" @{record.offset}")
    return f"{name} (again)" if record.reference else name


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
