"""The detail of each cell: its histograms, channels and quantiles, the rows of a cell put together exactly.

Quantiles can not be put together, so a cell of several rows has none.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.quantscope.analysis.channels import pooled_channels
from megatron.quantscope.analysis.distribution import score_quantiles
from megatron.quantscope.report.html.data_cells import Cells
from megatron.quantscope.report.html.data_histograms import exponent_histograms, scale_histograms
from megatron.quantscope.report.html.encode import number, numbers

Part = dict[str, Any]

CHANNEL_TILES = 144
CHANNEL_STEPS = 16
"""Channel maxima are whole steps of log2, this many a binade, which is finer than a screen."""
TOP_CHANNELS = 8
_FILES_NAMED = 4
_MOST_TILES = 700_000  # of all cells together: what a page can hold
_FEWEST_TILES = 16
_DIGITS = 3  # of quantiles, which are drawn, not read
_NUMBERS = ("amax", "rms", "mean", "kurtosis", "zero_percent", "min", "max")
_OF_ROWS = ("file", "shape", "dtype", "quantiles", "channel_amax")
_WHOLE = {"n": "count", "nan": "nan", "inf": "inf", "zero": "zero", "tensors": "rows"}


def details_of(cells: Cells) -> dict[str, list[Any]]:
    """What the page of each cell shows: field -> by cell, which packs better than records do."""
    tiles = max(_FEWEST_TILES, min(CHANNEL_TILES, _MOST_TILES // max(1, len(cells))))
    groups = cells.groups
    columns: dict[str, list[Any]] = {name: [*numbers(groups[name].to_numpy(float))] for name in _NUMBERS}
    columns |= {name: groups[source].tolist() for name, source in _WHOLE.items()}
    columns["exponents"] = exponent_histograms(cells)
    columns["scales"] = scale_histograms(cells)
    rows = zip(*(cells.rows[name] for name in ("cell", *_OF_ROWS)), strict=True)
    found = [
        _of_rows([dict(zip(_OF_ROWS, row[1:], strict=True)) for row in of_cell], tiles)
        for _, of_cell in groupby(rows, key=itemgetter(0))
    ]
    return columns | {name: [part[name] for part in found] for name in found[0]}


def _of_rows(rows: list[Part], tiles: int) -> Part:
    files = [Path(row["file"]).name for row in rows if isinstance(row["file"], str)]
    first = rows[0]
    known = len(rows) == 1 and first["quantiles"] is not None and len(first["quantiles"]) > 0
    return {
        "shape": None if first["shape"] is None else [int(size) for size in first["shape"]],
        "dtype": first["dtype"],
        "files": files[:_FILES_NAMED],
        "more_files": max(0, len(files) - _FILES_NAMED),
        "quantiles": _short(score_quantiles(first["quantiles"])) if known else None,
        **_channels([row["channel_amax"] for row in rows], tiles),
    }


def _channels(found: list[Any], tiles: int) -> Part:
    """The largest of each channel over the rows, those of the widest alone where widths differ."""
    arrays = [np.asarray(row, dtype=np.float32) for row in found if row is not None]
    width = max((len(row) for row in arrays), default=0)
    if not width:
        return {"channels": None, "top_channels": []}
    largest = np.fmax.reduce([row for row in arrays if len(row) == width])
    largest = np.where(np.isfinite(largest), largest, 0)
    top = np.argsort(-largest, kind="stable")[:TOP_CHANNELS]
    pooled = pooled_channels(largest, min(width, tiles)).astype(float)
    steps = np.round(CHANNEL_STEPS * np.log2(np.where(pooled > 0, pooled, 1)))
    values = [int(step) if value > 0 else None for step, value in zip(steps, pooled, strict=True)]
    return {
        "channels": {"width": width, "per_binade": CHANNEL_STEPS, "values": values},
        "top_channels": [[int(channel), number(largest[channel])] for channel in top],
    }


def _short(values: npt.NDArray[np.floating[Any]]) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if value - value == 0 else None for value in values.tolist()]
