"""The few tensors that are looked at in full: those with the most pronounced outliers, and those that lose most."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron.quantscope.analysis.channels import max_pooled, peak_of, tokens_by_channels
from megatron.quantscope.analysis.format_errors import Treatment
from megatron.quantscope.analysis.quantised_view import QuantisedView, quantised_view
from megatron.quantscope.analysis.roles import ACTIVATION, GRADIENT, role_of
from megatron.quantscope.analysis.tables import location_of
from megatron.quantscope.analysis.trained_as import TRAINED_AS
from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.location import Location
from megatron.quantscope.formats import ALIASES, FORMATS

if TYPE_CHECKING:
    import pandas
    from torch import Tensor

TOKEN_TILES, CHANNEL_TILES = 96, 144
_WANTED = {ACTIVATION: 3, GRADIENT: 1}  # surfaces of each family, each of another site
_WORST = 2  # operands of each type that lose most, each of another site
_DEFAULT_FORMAT = "mxfp8"
_PROBABILITIES = "p"  # their range is that of a softmax, whatever the format


@dataclass(frozen=True, kw_only=True)
class SurfacePlace:
    """A tensor that is worth a look.

    Attributes:
        quant_type: Of its run.
        site: Such as `fc2.y`.
        layer: From 0.
        location: Where it lies.
        layer_type, tensor_name, head_dim: Of its row.
        format: With blocks, that an operand is also shown under; None: it is no operand, or no format applies to it.
        outliers: Whether it stands for its outliers; else it is among those that lose most.
    """

    quant_type: str
    site: str
    layer: int
    location: Location
    layer_type: str = ""
    tensor_name: str = ""
    head_dim: int | None = None
    format: str | None = None
    outliers: bool = True


@dataclass(frozen=True, kw_only=True)
class Surface:
    """|x| of a tensor, max-pooled.

    Attributes:
        place: Which tensor.
        tokens: How many it has.
        channels: How many it has.
        values: [tiles, tiles] at most TOKEN_TILES x CHANNEL_TILES.
        peak: (token, channel) of its largest magnitude.
        quantised: What the format of the place does to it; None for results.
    """

    place: SurfacePlace
    tokens: int
    channels: int
    values: npt.NDArray[np.float32]
    peak: tuple[int, int]
    quantised: QuantisedView | None = None


def surface_places(summary: pandas.DataFrame) -> list[SurfacePlace]:
    """The tensors of each type whose amax stands out most from their median, and the operands that lose most.

    Each site once of either.
    """
    rows = summary[summary["layer_idx"].notna() & (summary["amax"] > 0) & (summary["median_magnitude"] > 0)]
    rows = rows[rows["file"].notna() & (rows["symbol"] != _PROBABILITIES)]
    rows = rows.assign(prominence=rows["amax"] / rows["median_magnitude"]).sort_values("prominence", ascending=False)
    places = []
    for quant_type, of_type in rows.groupby("quant_type"):
        for family, wanted in _WANTED.items():
            best = of_type[of_type["family"] == family].drop_duplicates("site").head(wanted)
            places += [_place(row) for row in best.to_dict("records")]
        column = f"{block_format(quant_type)}.sqnr_db"
        if column in of_type:
            lossy = of_type[of_type["operand"] & np.isfinite(of_type[column].astype(float))]
            worst = lossy.sort_values(column).drop_duplicates("site").head(_WORST)
            places += [_place(row, outliers=False) for row in worst.to_dict("records")]
    return places


def block_format(quant_type: str) -> str:
    """The run's own format if its blocks have E8M0 scales, else MXFP8."""
    name = ALIASES.get(quant_type, quant_type)
    return name if name in FORMATS and FORMATS[name].scale == "e8m0" else _DEFAULT_FORMAT


def _place(row: dict[Hashable, Any], *, outliers: bool = True) -> SurfacePlace:
    head_dim = row.get("head_dim")
    quantised = row["operand"] and _was_tried(row)
    return SurfacePlace(
        quant_type=row["quant_type"],
        site=row["site"],
        layer=int(row["layer_idx"]),
        location=location_of(row),
        layer_type=row["layer_type"],
        tensor_name=row["tensor_name"],
        head_dim=int(head_dim) if head_dim is not None and head_dim == head_dim else None,
        format=_format_of(row) if quantised else None,
        outliers=outliers,
    )


def _format_of(row: dict[Hashable, Any]) -> str:
    """The format that the run used on this tensor if its blocks have E8M0 scales, else the run's."""
    own = row.get(TRAINED_AS)
    return block_format(Treatment.named(own).format if isinstance(own, str) else row["quant_type"])


def _was_tried(row: dict[Hashable, Any]) -> bool:
    """Whether any format was tried on a tensor; on integers none is."""
    import pandas

    return any(pandas.notna(value) for name, value in row.items() if str(name).endswith(".error_squares"))


def view_surface(place: SurfacePlace) -> Surface | None:
    """Read one tensor and pool it; None when it is empty or can not be read or measured."""
    try:
        tensor = place.location.load()
        return _surface_of(place, tensor) if tensor.numel() else None
    except (CaptureError, TypeError, RuntimeError, MemoryError):  # as in the scan, which has listed it
        return None


def _surface_of(place: SurfacePlace, tensor: Tensor) -> Surface:
    matrix = tokens_by_channels(tensor)
    quantised = None
    if place.format is not None:
        role = role_of(place.layer_type, place.tensor_name)
        quantised = quantised_view(tensor, role, place.format, place.head_dim)
    return Surface(
        place=place,
        tokens=matrix.shape[0],
        channels=matrix.shape[1],
        values=max_pooled(tensor, TOKEN_TILES, CHANNEL_TILES),
        peak=peak_of(tensor),
        quantised=quantised,
    )
