"""`what-if`: what every format and scale rule would do to the tensors of a capture, GEMM by GEMM."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.analysis.replaced_files import replaced
from megatron.quantscope.report.commands.error_table import one_figure
from megatron.quantscope.report.commands.opening import DONE, FAILED, USAGE, analysed, complain, workers_of

if TYPE_CHECKING:
    import pandas

    from megatron.quantscope.analysis.study import Study

_GROUPS = {
    "tensor": None,
    "layer": ["quant_type", "layer_idx"],
    "site": ["quant_type", "site"],
    "type": ["quant_type"],
}
_TENSOR = ["quant_type", "iteration", "rank", "micro_batch", "layer_idx", "site"]  # what names a line of one tensor


def run(options: argparse.Namespace) -> int:
    """Print or write the table; 1 where something could not be read."""
    from megatron.quantscope.analysis.errors import AnalysisError, told_in_one_line
    from megatron.quantscope.analysis.what_if import what_if

    target = Path(options.output) if options.output else None
    if target is not None and target.suffix not in _WRITERS:
        return complain(f"--output {target}: its name has to end in {' or '.join(_WRITERS)}", USAGE)
    try:
        with told_in_one_line(target, workers_of(options)):
            with tempfile.TemporaryDirectory(prefix="quantscope-") as tables:
                study = analysed(options, Path(tables), details=False)
                table = what_if(study.summary, _GROUPS[options.by])
            if options.formats:  # the types of the capture are tried in any case
                table = table[table["format"].isin(options.formats)]
            if table.empty:
                return complain(f"no format can be tried on {options.directory}: {_reason(study)}", FAILED)
            if target is not None:
                _write(table, target)
    except AnalysisError as error:
        return complain(str(error), FAILED)
    print(one_figure(table, _GROUPS[options.by] or _TENSOR, options.metric) if target is None else target)
    if study.problems:
        return complain(f"{len(study.problems)} problems; the first: {study.problems[0]}", FAILED)
    return DONE


def _reason(study: Study) -> str:
    if study.summary["file"].isna().all():
        return "only statistics of its tensors were kept, by --tensor-save-mode statistics"
    return "none of its tensors is of a floating-point dtype"


def _write(table: pandas.DataFrame, target: Path) -> None:
    """A file that is complete or absent."""
    with replaced(target) as temporary:
        _WRITERS[target.suffix](table, temporary)


_WRITERS: dict[str, Callable[[pandas.DataFrame, Path], None]] = {
    ".csv": lambda table, path: table.to_csv(path, index=False),
    ".parquet": lambda table, path: table.to_parquet(path, index=False),
}
