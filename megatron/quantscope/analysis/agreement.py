"""Ranks and micro-batches side by side: the same site of the same layer, how far apart.

Both are a division of the rows: a column `part` names the part that a row belongs to, and `order` sorts the parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron.quantscope.analysis.aggregate import Floats, layer_matrix, merged

if TYPE_CHECKING:
    import pandas

_MICRO_BATCH = (("iteration", "iteration"), ("micro_batch", "micro-batch"), ("sample_idx", "sample"))
_RANK = (("rank", "rank"),)
_UNKNOWN = "not told"


def ranks(frame: pandas.DataFrame) -> pandas.DataFrame:
    """The rows, divided by rank."""
    return _divided(frame, _RANK)


def micro_batches(frame: pandas.DataFrame) -> pandas.DataFrame:
    """The rows, divided by micro-batch, by what is known of it.

    A weight is written once in an iteration, so it counts with the first micro-batch of it.
    """
    return _divided(frame, _MICRO_BATCH)


def spread_by_layer(frame: pandas.DataFrame) -> tuple[list[str], list[int], Floats]:
    """log2 of the largest over the smallest rms among the parts: sites, layers, [sites, layers].

    Sites that only one part has are left out.
    """
    rms = merged(frame, ["site", "layer_idx", "part"])["rms"]
    groups = rms[rms > 0].groupby(level=["site", "layer_idx"])
    spread = np.log2(groups.max() / groups.min())[groups.size() > 1]
    return layer_matrix(spread.to_frame("binades"), "binades")


def rank_deviation(frame: pandas.DataFrame, parts: list[str]) -> tuple[list[int], Floats]:
    """How far each part is from the others: log2 of its rms over their median, of the site where it is farthest.

    Args:
        frame: Rows with a column `part`.
        parts: Which of them, in the order of the rows of the image.

    Returns:
        The layers, and [parts, layers]; NaN where a part has nothing that others have too.
    """
    rms = merged(frame, ["site", "layer_idx", "part"])["rms"].unstack("part")
    rms = rms[rms.notna().sum(axis=1) > 1]
    deviation = np.log2(rms.div(rms.median(axis=1), axis=0))
    layers = [int(layer) for layer in sorted(frame["layer_idx"].unique())]
    image = np.full((len(parts), len(layers)), np.nan)
    for place, layer in enumerate(layers):
        if layer in deviation.index.unique("layer_idx"):
            of_layer = deviation.xs(layer, level="layer_idx").reindex(columns=parts)
            largest, smallest = of_layer.max().to_numpy(float), of_layer.min().to_numpy(float)
            image[:, place] = np.where(largest >= -smallest, largest, smallest)
    return layers, image


def _divided(frame: pandas.DataFrame, coordinates: tuple[tuple[str, str], ...]) -> pandas.DataFrame:
    known = frame[[column for column, _ in coordinates]].astype("float64")
    order = known.fillna(-1).apply(tuple, axis=1)
    names = {values: _name(values, coordinates) for values in order.unique()}
    return frame.assign(part=order.map(names), order=order)


def _name(values: tuple[float, ...], coordinates: tuple[tuple[str, str], ...]) -> str:
    parts = [f"{label} {value:.0f}" for (_, label), value in zip(coordinates, values, strict=True) if value >= 0]
    return ", ".join(parts) or f"{coordinates[0][1]} {_UNKNOWN}"
