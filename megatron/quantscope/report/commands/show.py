"""`show`: one tensor, or a few, in words: where it stands, what it holds, what every format would do to it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.analysis.roles import role_of
from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.tensor_file import damage
from megatron.quantscope.columns import aligned
from megatron.quantscope.report import numbers
from megatron.quantscope.report.commands.opening import DONE, FAILED, complain, opened
from megatron.quantscope.report.commands.parser import SHOWN_AT_MOST

if TYPE_CHECKING:
    import pandas

    from megatron.quantscope.capture import Capture
    from megatron.quantscope.capture.record import TensorRecord

_FIELDS = ("module", "gemm", "shape", "dtype", "stage", "shard", "formats", "run_id", "checksum")  # of a record
_STATISTICS = ("min", "max", "amax", "mean", "rms", "std", "median_magnitude", "kurtosis")
_CHANNELS = 4  # the largest that are named


def run(options: argparse.Namespace) -> int:
    """Show what was asked for; 1 where one of the tensors can not be read."""
    path = Path(options.path)
    wrong = damage(path) if path.is_file() and path.suffix == ".pt" else None
    if wrong:
        return complain(f"{path} {wrong}", FAILED)
    capture = _of_file(options, path) if path.is_file() else opened(options, path)
    shown = capture.records[:SHOWN_AT_MOST]
    texts = [_text(capture, record, options.formats) for record in shown]
    print("\n\n".join(text for text in texts if text))
    rest = len(capture.records) - len(shown)
    if rest:
        print(f"\n{rest:,} more match: filters such as --layer and --tensor choose")
    return DONE if all(texts) else FAILED


def _of_file(options: argparse.Namespace, path: Path) -> Capture:
    """What one file holds: the rows of the manifest beside it that name it, else what it says of itself."""
    capture = opened(options, path.parent)
    records = [record for record in capture.records if record.path == path and not record.reference]
    if not records:
        raise CaptureError(f"no captured tensor is in {path}")
    return replace(capture, records=records)


def _text(capture: Capture, record: TensorRecord, formats: Sequence[str] | None) -> str:
    """Everything about one tensor; empty, and a line on stderr, where it can not be read."""
    import pandas

    from megatron.quantscope.analysis.aggregate import treatments_of
    from megatron.quantscope.analysis.format_errors import treatments
    from megatron.quantscope.analysis.scan import Problem, measure_record
    from megatron.quantscope.analysis.what_if import what_if
    from megatron.quantscope.report.commands.error_table import all_figures

    _, outcome = measure_record(capture, treatments(formats=formats), record)
    if isinstance(outcome, Problem):
        complain(f"{outcome.file}: {outcome.reason}", FAILED)
        return ""
    record, row = capture.describe(record), pandas.DataFrame([outcome])
    parts = [record.title, _facts(record), _numbers(row.iloc[0])]
    if record.location is not None and treatments_of(row):  # of statistics, integers and booleans nothing is tried
        parts += ["", all_figures(what_if(row))]
    return "\n".join(parts)


def _facts(record: TensorRecord) -> str:
    symbol = role_of(record.layer_type, record.tensor_name)
    known = [(name, getattr(record, name)) for name in _FIELDS]
    lines = [("tensor", f"{symbol.symbol}: {symbol.title}"), *((name, str(value)) for name, value in known if value)]
    if record.path is None:
        lines.append(("file", "none: only its statistics were kept"))
    else:
        lines.append(("file", f"{record.path}" + ("" if record.offset is None else f" at byte {record.offset}")))
    return aligned((f"  {name}", value) for name, value in lines)


def _numbers(row: pandas.Series) -> str:
    counts = f"{int(row['count']):,}, zero {int(row['zero']):,}, NaN {int(row['nan']):,}, Inf {int(row['inf']):,}"
    lines = [("elements", counts)]
    lines += [(name.replace("_", " "), numbers.magnitude(row[name])) for name in _STATISTICS if name in row]
    channels = list(row.get("channel_amax", ()))
    if channels:
        largest = sorted(range(len(channels)), key=lambda channel: -channels[channel])[:_CHANNELS]
        words = (f"{channel}: {numbers.magnitude(channels[channel])}" for channel in largest)
        lines.append(("largest channels", ", ".join(words)))
    return aligned((f"  {name}", value) for name, value in lines)
