"""hifp8_analysis/: which of HiFloat8's precision bands the values use, and where that beats a block scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron.quantscope.analysis.aggregate import Floats, layer_matrix, merged
from megatron.quantscope.analysis.band_use import HIFP8, band_percentages, full_precision_percent, histograms_by_symbol
from megatron.quantscope.analysis.exponents import PrecisionBand, precision_bands
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.report.axes import draw_site_image
from megatron.quantscope.report.page import new_page
from megatron.quantscope.report.panels import color_bar
from megatron.quantscope.report.style import INK, PRECISION_COLORS, SEQUENTIAL, SIGNED, SPAN_COLORS, tried_formats

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABEL_FROM = 4.0  # percent: segments as wide as this have room for their number
_DARK_BITS = 2  # bands with as many bits have dark colours
_WIDEST_DIFFERENCE = 15.0  # dB


def draw_band_use(study: Study, quant_type: str) -> Figure | None:
    """Stacked shares of the precision bands for each kind of operand."""
    from matplotlib.patches import Patch

    frame = study.of_type(quant_type).query("operand")
    histograms = histograms_by_symbol(frame)
    if not histograms:
        return None
    bands = precision_bands(HIFP8)
    page = new_page(
        10.5,
        0.6 + 0.36 * len(histograms),
        title="How HiF8's precision is used",
        note="Percent of the non-zero elements in each precision band, from the smallest magnitudes (left) to the "
        f"largest. Gradients also after pow2-amax, which brings their amax to at most {HIFP8.full_precision_max:g}.",
        study=study,
        quant_type=quant_type,
        frame=frame,
        legend=[Patch(color=_color(band), label=_band_title(band)) for band in bands],
    )
    axes = page.subplots()
    for row, histogram in enumerate(histograms.values()):
        _stack(axes, row, band_percentages(histogram, bands), bands)
    axes.set_yticks(range(len(histograms)), list(histograms))
    axes.set_ylim(len(histograms) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the non-zero elements")
    axes.grid(visible=False, axis="y")
    return page


def draw_full_precision(study: Study, quant_type: str) -> Figure | None:
    """Image of the share of elements in the band with all fraction bits."""
    frame = _operands(study, quant_type)
    if frame.empty:
        return None
    shares = frame.groupby(["site", "layer_idx"]).apply(full_precision_percent, include_groups=False)
    inner = HIFP8.bands[0]
    band = f"$2^{{{-inner.limit}}}\\leq|x|<2^{{{inner.limit + 1}}}$"
    return _draw_image(
        study,
        quant_type,
        frame,
        shares.to_frame("value"),
        title="Operands in HiF8's band of full precision",
        note=f"Percent of the non-zero elements with {band}, where HiF8 has {inner.mantissa_bits} fraction bits; "
        "gradients after pow2-amax.",
        unit="% of the non-zero elements",
        limits=(0.0, 100.0),
    )


def draw_against_mxfp8(study: Study, quant_type: str) -> Figure | None:
    """Image of HiF8's SQNR less MXFP8's."""
    frame = _operands(study, quant_type)
    if frame.empty:
        return None
    if len(tried_formats(frame, ("hifp8", "mxfp8"))) < 2:
        return None
    groups = merged(frame, ["site", "layer_idx"])
    difference = (groups["hifp8.sqnr_db"] - groups["mxfp8.sqnr_db"]).replace([np.inf, -np.inf], np.nan)
    largest = difference.abs().max()
    widest = min(_WIDEST_DIFFERENCE, max(1.0, float(largest) if largest == largest else 0.0))
    return _draw_image(
        study,
        quant_type,
        frame,
        difference.to_frame("value"),
        title="HiF8 against MXFP8",
        note="SQNR under HiF8 less SQNR under MXFP8 (E4M3), in dB: red where HiF8 keeps more, blue where the block "
        "scale does; gradients of HiF8 after pow2-amax.",
        unit="dB",
        limits=(-widest, widest),
    )


def _operands(study: Study, quant_type: str) -> pandas.DataFrame:
    frame = study.of_type(quant_type)
    return frame[frame["operand"] & frame["layer_idx"].notna()]


def _draw_image(
    study: Study,
    quant_type: str,
    frame: pandas.DataFrame,
    groups: pandas.DataFrame,
    *,
    title: str,
    note: str,
    unit: str,
    limits: tuple[float, float],
) -> Figure:
    """A page with one image of `groups["value"]`, signed colours where the limits lie on both sides of zero."""
    from matplotlib.colors import Normalize

    sites, layers, values = layer_matrix(groups, "value")
    height = 0.5 + 0.22 * len(sites)
    page = new_page(7.2, height, title=title, note=note, study=study, quant_type=quant_type, frame=frame)
    axes = page.subplots()
    cmap = SIGNED if limits[0] < 0 else SEQUENTIAL
    image = draw_site_image(axes, sites, layers, values, Normalize(*limits), cmap)
    color_bar(page, image, axes, unit)
    return page


def _stack(axes: Axes, row: int, percentages: Floats, bands: tuple[PrecisionBand, ...]) -> None:
    left = 0.0
    for percent, band in zip(percentages, bands, strict=True):
        axes.barh(row, percent, 0.7, left=left, color=_color(band), lw=0)
        if percent >= _LABEL_FROM:
            dark = band.mantissa_bits is not None and band.mantissa_bits >= _DARK_BITS
            color = "white" if dark else INK
            axes.text(left + percent / 2, row, f"{percent:.0f}", ha="center", va="center", fontsize=7, color=color)
        left += percent


def _color(band: PrecisionBand) -> str:
    return SPAN_COLORS["overflow"] if np.isinf(band.upper) else PRECISION_COLORS[band.mantissa_bits]


def _band_title(band: PrecisionBand) -> str:
    if np.isinf(band.lower):
        return f"becomes 0: < $2^{{{band.upper:g}}}$"
    if np.isinf(band.upper):
        return f"$\\geq 2^{{{band.lower:g}}}$"
    bits = "bit" if band.mantissa_bits == 1 else "bits"
    return f"{band.mantissa_bits} {bits}: $2^{{{band.lower:g}}}$ to $2^{{{band.upper:g}}}$"
