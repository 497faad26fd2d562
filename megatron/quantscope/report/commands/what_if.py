"""`what-if`: what every format and scale rule would do to the tensors of a capture, GEMM by GEMM."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.report.commands.error_table import one_figure
from megatron.quantscope.report.commands.opening import DONE, FAILED, USAGE, analysed, complain

if TYPE_CHECKING:
    import pandas

_GROUPS = {
    "tensor": None,
    "layer": ["quant_type", "layer_idx"],
    "site": ["quant_type", "site"],
    "type": ["quant_type"],
}
_TENSOR = ["quant_type", "iteration", "rank", "micro_batch", "layer_idx", "site"]  # what names a line of one tensor


def run(options: argparse.Namespace) -> int:
    """Print or write the table; 1 where something could not be read."""
    from megatron.quantscope.analysis.analyse import AnalysisError
    from megatron.quantscope.analysis.what_if import what_if

    target = Path(options.output) if options.output else None
    if target is not None and target.suffix not in _WRITERS:
        return complain(f"--output {target}: its name has to end in {' or '.join(_WRITERS)}", USAGE)
    try:
        with tempfile.TemporaryDirectory(prefix="quantscope-") as tables:
            study = analysed(options, Path(tables), details=False)
            table = what_if(study.summary, _GROUPS[options.by])
        if options.formats:  # the types of the capture are tried in any case
            table = table[table["format"].isin(options.formats)]
        if target is None:
            print(one_figure(table, _GROUPS[options.by] or _TENSOR, options.metric))
        else:
            _write(table, target)
            print(target)
    except AnalysisError as error:
        return complain(str(error), FAILED)
    except OSError as error:
        return complain(f"can not write {error.filename or target}: {error.strerror or error}", FAILED)
    if study.problems:
        return complain(f"{len(study.problems)} problems; the first: {study.problems[0]}", FAILED)
    return DONE


def _write(table: pandas.DataFrame, target: Path) -> None:
    """A file that is complete or absent."""
    temporary = target.with_name(f".{target.name}.writing-{os.getpid()}")
    try:
        _WRITERS[target.suffix](table, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


_WRITERS: dict[str, Callable[[pandas.DataFrame, Path], None]] = {
    ".csv": lambda table, path: table.to_csv(path, index=False),
    ".parquet": lambda table, path: table.to_parquet(path, index=False),
}
