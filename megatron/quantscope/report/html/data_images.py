"""The images of the page: surfaces of tokens by channels, maps of blocks, and attention, as many as fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron.quantscope.analysis.study import Study
from megatron.quantscope.report.html.data_cells import Cells
from megatron.quantscope.report.html.encode import numbers, tile

if TYPE_CHECKING:
    from megatron.quantscope.analysis.attention import AttentionView
    from megatron.quantscope.analysis.surfaces import Surface

Part = dict[str, Any]
Floats = npt.NDArray[np.float32]

MOST_SURFACES = 30
MOST_MAP_VALUES = 700_000
_MAP_SIZES = ((64, 64), (48, 16), (32, 12), (32, 6), (32, 4), (24, 4), (16, 4), (16, 2), (16, 1))
"""(side, heads) of the attention maps of a layer, the best first; the first that fits is taken for all."""


def surfaces(study: Study, cells: Cells) -> list[Part]:
    """The contract's `surfaces`, the largest outliers first."""
    found = []
    for surface in study.surfaces:
        cell = _cell_of(cells, surface.place)
        if cell is not None:
            found.append((_prominence(surface), {"cell": cell, **_surface(surface)}))
    found.sort(key=lambda pair: -pair[0])
    return [part for _, part in found[:MOST_SURFACES]]


def block_maps(study: Study, cells: Cells) -> list[Part]:
    """The contract's `block_maps`: the operands that were quantised block by block, the worst first."""
    found = []
    for surface in study.surfaces:
        view, cell = surface.quantised, _cell_of(cells, surface.place)
        if view is not None and cell is not None:
            of_blocks = {"format": view.format, "gemm": view.gemm, "rows": view.rows, "blocks": view.blocks}
            found.append((float(np.nanmin(view.sqnr_db)), {"cell": cell, **of_blocks, **tile(view.sqnr_db)}))
    found.sort(key=lambda pair: pair[0])
    return [part for _, part in found[:MOST_SURFACES]]


def attention(study: Study) -> list[Part]:
    """The contract's `attention`: the numbers of every head, the maps of as many heads as fit, the sharpest first."""
    if not study.attention:
        return []
    heads = [len(view.entropy_bits) for view in study.attention]
    side, most = next(
        (size for size in _MAP_SIZES if sum(min(size[1], n) for n in heads) * size[0] ** 2 <= MOST_MAP_VALUES),
        _MAP_SIZES[-1],
    )
    return [_attention(view, side, most) for view in study.attention]


def max_pooled_map(values: Floats, rows: int, columns: int) -> Floats:
    """[r, c] -> at most [rows, columns] tiles, each the largest in it; bounds as adaptive pooling has them."""
    for axis, most in ((0, rows), (1, columns)):
        size = values.shape[axis]
        if size > most:
            starts = np.arange(most) * size // most
            values = np.maximum.reduceat(values, starts, axis=axis)
    return values


def _surface(surface: Surface) -> Part:
    return {
        "tokens": surface.tokens,
        "channels": surface.channels,
        "peak": [int(place) for place in surface.peak],
        **tile(surface.values),
    }


def _prominence(surface: Surface) -> float:
    middle = float(np.median(surface.values))
    return float(surface.values.max(initial=0.0)) / middle if middle > 0 else 0.0


def _cell_of(cells: Cells, place: Any) -> int | None:
    """The cell that holds the tensor of a place: by its file, where a row names it."""
    location = getattr(place, "location", None)
    rows = cells.rows
    if location is not None:
        same = rows["file"] == str(location.path)
        if location.offset is not None:
            same &= rows["offset"] == location.offset
        if same.any():
            return int(rows.loc[same, "cell"].iloc[0])
    found = cells.places.get((place.quant_type, place.site, int(place.layer)))
    return found[0] if found else None


def _attention(view: AttentionView, side: int, most: int) -> Part:
    sharpest = np.argsort(view.entropy_bits, kind="stable")[:most]
    return {
        "type": view.pair.quant_type,
        "layer": view.pair.layer,
        "where": view.pair.where,
        "heads": len(view.entropy_bits),
        "queries": view.queries,
        "keys": view.keys,
        "entropy_bits": numbers(view.entropy_bits),
        "first_token": numbers(view.first_token),
        "largest_score": numbers(view.largest_score),
        "recomputed": bool(getattr(view, "recomputed", True)),
        "maps": [_map(view.maps, int(head), side) for head in sorted(sharpest)],
    }


def _map(maps: Floats, head: int, side: int) -> Part:
    return {"head": head, **tile(max_pooled_map(maps[head], side, side))}
