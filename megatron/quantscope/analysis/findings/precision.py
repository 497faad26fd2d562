"""Layers that lose more than the others under a format, and what would be gained by keeping them as they are.

Of every operand the noise is taken relative to its signal, error_squares / sum_squares, and averaged over the operands
of a layer with equal weight: one tensor of large values does not hide what the others lose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from megatron.quantscope.analysis.findings.finding import NOTE, WARNING, Finding, Place, figure_path
from megatron.quantscope.analysis.findings.formats_tried import formats_of, treatments_with_uses
from megatron.quantscope.analysis.findings.words import layers, percent, title_of
from megatron.quantscope.analysis.study import Study

if TYPE_CHECKING:
    import pandas

_NOTABLE_DB = 3.0  # below the median layer: half the noise of the model's worst layers is theirs alone
_SEVERE_DB = 10.0
_FEWEST_LAYERS = 4  # fewer have no typical one
_MOST_SHARE = 0.25  # of the layers: where more are worse than the median, it is the format and not these layers
_FAINTEST_DB = 45.0  # what a layer keeps, a layer that keeps more is as good as exact


def find_layers_to_keep(study: Study) -> Iterator[Finding]:
    """At most one finding a type and format."""
    for quant_type in study.types:
        frame = study.of_type(quant_type)
        operands = frame[frame["operand"] & frame["layer_idx"].notna() & (frame["sum_squares"] > 0)]
        for name in formats_of(study, quant_type):
            noise = layer_noise(operands, treatments_with_uses(study, name))
            finding = _finding(quant_type, name, noise)
            if finding is not None:
                yield finding


def layer_noise(operands: pandas.DataFrame, treatments: list[str]) -> pandas.Series:
    """Layer -> mean noise to signal ratio of its operands under these treatments, ascending by layer."""
    import pandas

    parts = []
    for treatment in treatments:
        rows = operands[operands[f"{treatment}.error_squares"].notna() & ~(operands[f"{treatment}.lost"] > 0)]
        sums = rows.groupby(["layer_idx", "site"])[[f"{treatment}.error_squares", "sum_squares"]].sum()
        parts.append(sums[f"{treatment}.error_squares"] / sums["sum_squares"])
    return pandas.concat(parts).groupby("layer_idx").mean() if parts else pandas.Series(dtype=float)


def _finding(quant_type: str, name: str, noise: pandas.Series) -> Finding | None:
    if len(noise) < _FEWEST_LAYERS or not noise.max() > 0:
        return None
    median = max(float(noise.median()), 10 ** (-_FAINTEST_DB / 10))
    worst = noise[noise >= median * 10 ** (_NOTABLE_DB / 10)].sort_values(ascending=False)
    if worst.empty or len(worst) > _MOST_SHARE * len(noise):
        return None
    numbers = [int(layer) for layer in worst.index]
    share = 100 * worst.sum() / noise.sum()
    gain = _db(float(noise.sum() / (noise.sum() - worst.sum())))
    below = _db(float(worst.iloc[0]) / median)
    return Finding(
        kind="keep_precision",
        severity=WARNING if below >= _SEVERE_DB else NOTE,
        title=f"{title_of(name)}: keep {layers(numbers)} in higher precision",
        text=f"The operands of layer {numbers[0]} keep {_db(1 / float(worst.iloc[0])):.1f} dB, {below:.1f} dB less "
        f"than those of the median layer. {percent(share)} of the power of the relative error of all {len(noise)} "
        f"layers is made in {layers(numbers)}; without it the mean SQNR rises by {gain:.1f} dB.",
        numbers={
            "layers": len(numbers),
            "worst_layer": numbers[0],
            "below_median_db": below,
            "gain_db": gain,
            "share_percent": float(share),
        },
        place=Place(quant_type=quant_type, layer=numbers[0]),
        metric="sqnr",
        format=name,
        figure=figure_path("quantization_analysis", "sqnr_by_layer", quant_type),
        weight=below / _NOTABLE_DB,
    )


def _db(ratio: float) -> float:
    return float(10 * np.log10(ratio))
