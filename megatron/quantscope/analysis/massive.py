"""Massive activations: where one channel of a tensor holds a value out of all proportion, and its way along the depth.

The criterion is that of Sun et al. (2024): a magnitude above 100, and a thousand times the median magnitude of its
tensor. The layers of a site whose largest value is in the same channel, and still a hundredth of the largest of them,
belong to the same activation: so the values that take it out again are seen with those that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron.quantscope.analysis.roles import ACTIVATION, site_order

if TYPE_CHECKING:
    import pandas

LEAST_MAGNITUDE = 100.0
LEAST_TIMES_MEDIAN = 1000.0
_PROBABILITIES = "p"  # at most 1 each
_LEAST_SHARE = 0.01  # of the largest value of the channel: layers with less have no part in it


@dataclass(frozen=True, kw_only=True)
class LayerPeak:
    """The largest value of one channel in one layer.

    Attributes:
        layer: From 0.
        value: With its sign, where it is the largest of its tensor; else its magnitude.
        times_median: Of the tensor.
    """

    layer: int
    value: float
    times_median: float


@dataclass(frozen=True, kw_only=True)
class MassiveActivation:
    """One channel of one site.

    Attributes:
        site: Such as `fc2.y`.
        channel: From 0.
        channels: How many the site has.
        peaks: Of the layers where it stands out, ascending.
    """

    site: str
    channel: int
    channels: int
    peaks: tuple[LayerPeak, ...]

    @property
    def largest(self) -> LayerPeak:
        """The layer with the largest magnitude."""
        return max(self.peaks, key=lambda peak: abs(peak.value))

    @property
    def opposed(self) -> list[LayerPeak]:
        """The later layers whose value has the other sign."""
        largest = self.largest
        return [peak for peak in self.peaks if peak.layer > largest.layer and peak.value * largest.value < 0]

    @property
    def layers(self) -> list[int]:
        """The layers where it stands out."""
        return [peak.layer for peak in self.peaks]


def massive_activations(frame: pandas.DataFrame) -> list[MassiveActivation]:
    """The massive activations among these rows of one type, the largest first."""
    rows = frame[(frame["family"] == ACTIVATION) & (frame["symbol"] != _PROBABILITIES)]
    rows = rows[rows["layer_idx"].notna() & (rows["median_magnitude"] > 0)]
    found = []
    for site, of_site in rows.groupby("site"):
        massive = of_site["amax"] >= np.maximum(LEAST_MAGNITUDE, LEAST_TIMES_MEDIAN * of_site["median_magnitude"])
        if not massive.any():
            continue
        of_site = of_site.assign(channel=[_peak_channel(row) for row in of_site["channel_amax"]])
        channels = of_site.loc[massive].groupby("channel")["amax"].max().sort_values(ascending=False).index
        found += [_of_channel(str(site), of_site, int(channel)) for channel in channels if channel >= 0]
    return sorted(found, key=lambda one: (-abs(one.largest.value), site_order(one.site)))


def _of_channel(site: str, rows: pandas.DataFrame, channel: int) -> MassiveActivation:
    """The peaks of one channel; of several micro-batches and ranks the largest counts."""
    rows = rows[rows["channel"] == channel].sort_values("amax").drop_duplicates("layer_idx", keep="last")
    rows = rows[rows["amax"] >= _LEAST_SHARE * rows["amax"].max()].sort_values("layer_idx")
    peaks = tuple(
        LayerPeak(layer=int(layer), value=float(low if -low > high else high), times_median=float(amax / median))
        for layer, low, high, amax, median in zip(
            *(rows[name] for name in ("layer_idx", "min", "max", "amax", "median_magnitude")), strict=True
        )
    )
    channels = max(len(values) for values in rows["channel_amax"])
    return MassiveActivation(site=site, channel=channel, channels=channels, peaks=peaks)


def _peak_channel(channel_amax: Sequence[float]) -> int:
    values = np.asarray(channel_amax, dtype=float)
    return int(np.argmax(np.nan_to_num(values, nan=0.0, posinf=0.0))) if len(values) else -1
