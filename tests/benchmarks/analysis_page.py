"""The page of a large model: how long it takes to write, and how large it is.

Its summary is that of one layer in five types, repeated over the layers with values of their own, so that nothing
packs better than it would in earnest.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.benchmarks.analysis_capture import small_capture

if TYPE_CHECKING:
    import pandas
    from numpy.random import Generator

    from megatron.quantscope.analysis.study import Study

LAYERS = 48
TYPES = ("bf16", "fp16", "mxfp8", "mxfp4", "hifp8")
_TENSORS = ("input", "weight", "grad_output")
_SPREAD = 0.3  # of the values of a layer around the first one's, natural logarithm


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page that was written.

    Attributes:
        cells: Tensors that it shows.
        bytes: Its size.
        seconds: To write it.
    """

    cells: int
    bytes: int
    seconds: float


def write_page(folder: Path) -> Page:
    """Write the page of 48 layers x 4 modules x 3 tensors, each in five types and tried in every format."""
    from megatron.quantscope.report.html.build import write_report

    study = _study(folder)
    start = time.perf_counter()
    path = write_report(study, folder / "report.html")
    return Page(cells=len(study.summary), bytes=path.stat().st_size, seconds=time.perf_counter() - start)


def _study(folder: Path) -> Study:
    import numpy as np
    import pandas

    from megatron.quantscope.analysis.analyse import analyse
    from megatron.quantscope.analysis.findings import find
    from megatron.quantscope.analysis.tables import read_table
    from megatron.quantscope.capture import open_capture
    from megatron.quantscope.report.progress import Progress

    capture = open_capture(small_capture(folder / "capture"))
    study = analyse(capture, folder, 1, Progress(shown=False))
    summary = read_table(folder / "summary.parquet")
    layer = summary[(summary["layer_idx"] == 0) & summary["tensor_name"].isin(_TENSORS)]
    generator = np.random.default_rng(0)
    rows = [
        _varied(layer, generator).assign(quant_type=name, layer_idx=number)
        for name in TYPES
        for number in range(LAYERS)
    ]
    summary = pandas.concat(rows, ignore_index=True)
    surfaces = [replace(view, place=replace(view.place, quant_type=name)) for name in TYPES for view in study.surfaces]
    study = replace(
        study, summary=summary, index=summary, surfaces=surfaces, comparison=_comparison(summary, generator)
    )
    return replace(study, findings=find(study))


def _varied(rows: pandas.DataFrame, generator: Generator) -> pandas.DataFrame:
    """The rows with other numbers of the same size, so that no two layers are alike."""
    from megatron.quantscope.analysis.aggregate import treatments_of
    from megatron.quantscope.analysis.tables import RECORD_COLUMNS, summary_columns

    result = rows.copy()
    for name, kind in summary_columns(treatments_of(rows)).items():
        if name in RECORD_COLUMNS or name.endswith("_first") or kind == "string":
            continue
        result[name] = [_other(value, generator) for value in rows[name]]
    return result


def _other(value: Any, generator: Generator) -> Any:
    import numpy as np

    factors = np.exp(_SPREAD * generator.standard_normal(np.shape(value)))
    varied = np.asarray(value) * factors
    return varied.astype(np.asarray(value).dtype) if np.ndim(value) else type(value)(varied)


def _comparison(summary: pandas.DataFrame, generator: Generator) -> pandas.DataFrame:
    import pandas

    from megatron.quantscope.analysis.comparison import COLUMNS

    rows = summary[summary["quant_type"] != TYPES[0]]
    known = {name: rows.get(name) for name in COLUMNS}
    count = len(rows)
    return pandas.DataFrame(known).assign(
        run=rows["quant_type"],
        baseline=TYPES[0],
        order=range(count),
        equal=False,
        sqnr_db=generator.normal(30, 10, count),
        cosine=1 - generator.random(count) * 1e-3,
        relative_l2=generator.random(count) * 0.1,
        max_error=generator.random(count),
    )
