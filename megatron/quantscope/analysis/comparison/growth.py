"""How the distance from the baseline grows: forward along the depth, then backward from the last layer to the first.

Medians are over the tensors of a layer but its weights, in the first iteration that was compared: there the weights
still agree, so that what is seen is made by the network and the format, and not by another way of learning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.quantscope.analysis.comparison.parting import by_run, decibels
from megatron.quantscope.analysis.roles import WEIGHT
from megatron.quantscope.capture.metadata import BACKWARD, FORWARD

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The median SQNR of the layers of one run in one pass.

    Attributes:
        run, baseline: Labels.
        operation: "forward" or "backward".
        layers: In the order of the pass: ascending forward, descending backward.
        sqnr_db: Median of each; inf where most tensors are equal, -inf where most have lost elements.
        slope_db: dB a layer along the pass, by least squares over the finite medians; NaN for fewer than two.
        text: All of it in a sentence.
    """

    run: str
    baseline: str
    operation: str
    layers: tuple[int, ...]
    sqnr_db: tuple[float, ...]
    slope_db: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """What becomes of the distance where the backward pass begins, in the last layer.

    Attributes:
        run, baseline: Labels.
        layer: The last.
        forward_db, backward_db: Medians of its SQNR in both passes.
        text: All of it in a sentence.
    """

    run: str
    baseline: str
    layer: int
    forward_db: float
    backward_db: float
    text: str


def growths(table: pandas.DataFrame) -> list[Growth]:
    """The medians of the layers, forward and backward, of every run."""
    return [
        growth
        for _, rows in by_run(table)
        for operation in (FORWARD, BACKWARD)
        if (growth := _growth(rows, operation)) is not None
    ]


def steps(table: pandas.DataFrame) -> list[Step]:
    """The step from forward to backward of every run that has both."""
    found: dict[str, dict[str, Growth]] = {}
    for growth in growths(table):
        found.setdefault(growth.run, {})[growth.operation] = growth
    return [step for passes in found.values() if len(passes) == 2 and (step := _step(passes)) is not None]


def first_iteration(table: pandas.DataFrame) -> pandas.DataFrame:
    """The rows of the first iteration; all where iterations are not known."""
    first = table["iteration"].min()
    return table if first != first else table[table["iteration"] == first]


def flowing(table: pandas.DataFrame, operation: str) -> pandas.DataFrame:
    """The rows of one pass of numbered layers, without weights, which stand still."""
    return table[(table["operation"] == operation) & (table["family"] != WEIGHT) & table["layer_idx"].notna()]


def _growth(rows: pandas.DataFrame, operation: str) -> Growth | None:
    rows = flowing(first_iteration(rows), operation)
    if rows.empty:
        return None
    medians = rows.groupby("layer_idx")["sqnr_db"].agg(median).sort_index(ascending=operation == FORWARD)
    layers, values = tuple(int(layer) for layer in medians.index), tuple(float(value) for value in medians)
    slope = _slope(values)
    lowest = int(np.argmin(values))
    text = f"{rows.iloc[0]['run']}, {operation}: the median SQNR is {decibels(values[0])} in layer {layers[0]}"
    if len(layers) > 1:
        text += f" and {decibels(values[-1])} in layer {layers[-1]}"
        text += f" ({slope:+.2f} dB a layer)" if math.isfinite(slope) else ""
        text += f"; the lowest is {decibels(values[lowest])} in layer {layers[lowest]}"
    return Growth(
        run=rows.iloc[0]["run"],
        baseline=rows.iloc[0]["baseline"],
        operation=operation,
        layers=layers,
        sqnr_db=values,
        slope_db=slope,
        text=text + ".",
    )


def _step(passes: dict[str, Growth]) -> Step | None:
    forward, backward = passes[FORWARD], passes[BACKWARD]
    layer = forward.layers[-1]
    if backward.layers[0] != layer:
        return None
    before, after = forward.sqnr_db[-1], backward.sqnr_db[0]
    text = f"{forward.run}: from forward to backward, in layer {layer}, the median SQNR goes from {decibels(before)}"
    return Step(
        run=forward.run,
        baseline=forward.baseline,
        layer=layer,
        forward_db=before,
        backward_db=after,
        text=f"{text} to {decibels(after)}.",
    )


def median(values: Any) -> float:
    """The median where some are infinite: of two that do not agree the lower."""
    ordered = np.sort(np.asarray(values, dtype=float))
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[middle])
    lower, upper = float(ordered[middle - 1]), float(ordered[middle])
    return (lower + upper) / 2 if math.isfinite(lower) and math.isfinite(upper) else lower


def _slope(values: tuple[float, ...]) -> float:
    places, finite = np.arange(len(values)), np.isfinite(values)
    if np.count_nonzero(finite) < 2:
        return math.nan
    return float(np.polyfit(places[finite], np.asarray(values)[finite], 1)[0])
