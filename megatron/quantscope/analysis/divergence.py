"""How far runs of different formats have come apart: the same tensor of two runs, compared element by element.

Where several types were captured from one checkpoint and the same samples, a tensor of one run has a partner in the
baseline run (`Study.types[0]`, the least quantised). Its SQNR counts everything that happened before it, not only its
own quantisation: results are compared, the first micro-batch of the first iteration, where the weights still agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.quantscope.analysis.format_errors import FormatError
from megatron.quantscope.analysis.tables import location_of
from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.location import Location

if TYPE_CHECKING:
    import pandas

COMPARED = ("y", "o", "dx")
_KEY = ["iteration", "micro_batch", "sample_idx", "rank", "module", "site", "layer_idx", "operation"]


@dataclass(frozen=True, kw_only=True)
class DivergencePair:
    """The same tensor of two runs."""

    quant_type: str
    baseline: str
    site: str
    symbol: str
    layer: int
    location: Location
    baseline_location: Location


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """What became of one tensor.

    Attributes:
        pair: Which.
        sqnr_db: With the baseline's tensor as the signal; inf where both are equal, -inf where one is not finite.
        cosine: Cosine of the two as vectors; NaN where one is zero or not finite.
    """

    pair: DivergencePair
    sqnr_db: float
    cosine: float


def divergence_pairs(summary: pandas.DataFrame, baseline: str) -> list[DivergencePair]:
    """The results of every other type that have a partner in the baseline run."""
    rows = summary[summary["symbol"].isin(COMPARED) & summary["layer_idx"].notna() & summary["module"].notna()]
    if rows.empty or rows["quant_type"].nunique() == 1:
        return []
    rows = rows[rows["iteration"] == rows["iteration"].min()]
    rows = rows[rows["micro_batch"] == rows["micro_batch"].min()]
    rows = rows.assign(location=[location_of(row) for row in rows.to_dict("records")])
    of_baseline = rows[rows["quant_type"] == baseline][[*_KEY, "location"]]
    others = rows[rows["quant_type"] != baseline].merge(of_baseline, on=_KEY, suffixes=("", "_baseline"))
    return [
        DivergencePair(
            quant_type=row.quant_type,
            baseline=baseline,
            site=row.site,
            symbol=row.symbol,
            layer=int(row.layer_idx),
            location=row.location,
            baseline_location=row.location_baseline,
        )
        for row in others.itertuples()
    ]


def compare_pair(pair: DivergencePair) -> Divergence | None:
    """Compare two tensors; None when one can not be read or their shapes differ."""
    try:
        x, reference = (location.load() for location in (pair.location, pair.baseline_location))
    except CaptureError:  # the scan has listed it
        return None
    if x.shape != reference.shape:
        return None
    x, reference = x.double().flatten(), reference.double().flatten()
    signal, squares = torch.dot(reference, reference), torch.dot(x, x)
    error = torch.dot(x - reference, x - reference)
    finite = bool(torch.isfinite(error))
    sqnr = FormatError(error_squares=float(error) if finite else 0.0, lost=0 if finite else 1).sqnr_db(float(signal))
    cosine = float(torch.dot(x, reference) / (signal.sqrt() * squares.sqrt()))
    return Divergence(pair=pair, sqnr_db=sqnr, cosine=cosine)
