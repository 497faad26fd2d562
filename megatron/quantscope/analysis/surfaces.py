"""Tokens by channels of the few tensors with the most pronounced outliers, for the surfaces and their cuts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron.quantscope.analysis.channels import max_pooled, tokens_by_channels
from megatron.quantscope.analysis.roles import ACTIVATION, GRADIENT
from megatron.quantscope.analysis.tables import location_of
from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.location import Location

if TYPE_CHECKING:
    import pandas

TOKEN_TILES, CHANNEL_TILES = 96, 144
_WANTED = {ACTIVATION: 3, GRADIENT: 1}  # surfaces of each family, each of another site


@dataclass(frozen=True, kw_only=True)
class SurfacePlace:
    """A tensor that is worth a surface."""

    quant_type: str
    site: str
    layer: int
    location: Location


@dataclass(frozen=True, kw_only=True)
class Surface:
    """|x| of a tensor, max-pooled.

    Attributes:
        place: Which tensor.
        tokens: How many it has.
        channels: How many it has.
        values: [tiles, tiles] at most TOKEN_TILES x CHANNEL_TILES.
        peak: (token, channel) of its largest magnitude.
    """

    place: SurfacePlace
    tokens: int
    channels: int
    values: npt.NDArray[np.float32]
    peak: tuple[int, int]


def surface_places(summary: pandas.DataFrame) -> list[SurfacePlace]:
    """The tensors of each type whose amax stands out most from their median magnitude, each site once."""
    rows = summary[summary["layer_idx"].notna() & (summary["amax"] > 0) & (summary["median_magnitude"] > 0)]
    rows = rows.assign(prominence=rows["amax"] / rows["median_magnitude"]).sort_values("prominence", ascending=False)
    places = []
    for quant_type, of_type in rows.groupby("quant_type"):
        for family, wanted in _WANTED.items():
            best = of_type[of_type["family"] == family].drop_duplicates("site").head(wanted)
            places += [
                SurfacePlace(
                    quant_type=quant_type, site=row["site"], layer=int(row["layer_idx"]), location=location_of(row)
                )
                for row in best.to_dict("records")
            ]
    return places


def view_surface(place: SurfacePlace) -> Surface | None:
    """Read one tensor and pool it; None when it can not be read."""
    try:
        tensor = place.location.load()
    except CaptureError:  # the scan has listed it
        return None
    matrix = tokens_by_channels(tensor)
    largest = int(matrix.float().abs().nan_to_num(0, 0, 0).argmax())
    return Surface(
        place=place,
        tokens=matrix.shape[0],
        channels=matrix.shape[1],
        values=max_pooled(tensor, TOKEN_TILES, CHANNEL_TILES),
        peak=(largest // matrix.shape[1], largest % matrix.shape[1]),
    )
