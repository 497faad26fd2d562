"""heatmaps/: where outliers sit: tokens by channels of the most pronounced tensors, and channels along the depth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.quantscope.analysis.aggregate import channels_by_layer
from megatron.quantscope.analysis.massive import massive_activations
from megatron.quantscope.analysis.roles import site_order
from megatron.quantscope.analysis.stored_lists import has_items
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.analysis.surfaces import CHANNEL_TILES, TOKEN_TILES, Surface
from megatron.quantscope.report import numbers
from megatron.quantscope.report.axes import exponent_ticks, set_exponent_axis, set_layer_places
from megatron.quantscope.report.page import new_page
from megatron.quantscope.report.panels import add_panels, color_bar, layer_colors, note_right, rows_for
from megatron.quantscope.report.style import ALARM, MUTED, SEQUENTIAL

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_IMAGE_TILES = 288
_IMAGE_SYMBOLS, _CURVE_SYMBOLS = ("x", "y", "dy"), ("x", "dy")
_IMAGE_COLUMNS, _MOST_IMAGES = 3, 15
_STREAM = "residual"  # layer type of the stream between the layers, where it was captured
_MOST_NAMED = 3  # channels of a panel that an arrow points to
_CURVE_COLUMNS, _MOST_CURVES = 4, 8
_DARKEST = 0.02  # quantile of an image's values where its colours begin


def draw_surfaces(study: Study, quant_type: str) -> Figure | None:
    """Up to four tensors as landscapes of |x| over tokens and channels."""
    of_type = [surface for surface in study.surfaces if surface.place.quant_type == quant_type]
    surfaces = [surface for surface in of_type if surface.place.outliers]
    if not surfaces:
        return None
    columns = min(2, len(surfaces))
    rows = rows_for(len(surfaces), columns)
    page = new_page(
        5.2 * columns,
        0.2 + 3.5 * rows,
        title="Outliers by token and channel",
        note="|x| of the tensors whose amax stands out most from their median, max-pooled to at most "
        f"{TOKEN_TILES} x {CHANNEL_TILES} tiles: a ridge is an outlier channel, a spike a massive activation.",
        study=study,
        quant_type=quant_type,
    )
    for place, surface in enumerate(surfaces, start=1):
        _draw_surface(page.add_subplot(rows, columns, place, projection="3d"), surface)
    return page


def draw_channel_images(study: Study, quant_type: str) -> Figure | None:
    """Images: the amax of every channel against the layer, one panel a site."""
    frame = _numbered(study, quant_type, _IMAGE_SYMBOLS)
    massive = massive_activations(frame)
    sites = sorted(frame["site"].unique(), key=site_order)[:_MOST_IMAGES]
    if not sites:
        return None
    page = new_page(
        12.5,
        0.3 + 1.75 * rows_for(len(sites), _IMAGE_COLUMNS),
        title="The amax of every channel along the depth",
        note="A row is a layer, a column one or a few neighbouring channels (the largest of them). A bright column is "
        "an outlier channel that many layers share; a red arrow names the channel of a massive activation.",
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    panels = add_panels(page, sites, _IMAGE_COLUMNS)
    for site, axes in panels.of.items():
        _draw_channels(page, axes, frame[frame["site"] == site])
        _name_channels(axes, list(dict.fromkeys(one.channel for one in massive if one.site == site)))
    panels.label(x="channel", y="layer")
    return page


def draw_channel_curves(study: Study, quant_type: str) -> Figure | None:
    """Per-channel amax, sorted, one line a layer."""
    frame = _numbered(study, quant_type, _CURVE_SYMBOLS)
    sites = sorted(frame["site"].unique(), key=site_order)[:_MOST_CURVES]
    if not sites:
        return None
    page = new_page(
        1.6 + 2.6 * min(_CURVE_COLUMNS, len(sites)),
        0.3 + 2.1 * rows_for(len(sites), _CURVE_COLUMNS),
        title="Outlier channels: per-channel amax in descending order",
        note="A line a layer, channels from the largest to the smallest. A cliff at the left end means that few "
        "channels set the scale for all others.",
        study=study,
        quant_type=quant_type,
        frame=frame,
    )
    panels = add_panels(page, sites, _CURVE_COLUMNS, sharey=True)
    colors = layer_colors(frame["layer_idx"])
    for site, axes in panels.of.items():
        rows = frame[frame["site"] == site].drop_duplicates("layer_idx").sort_values("layer_idx")
        for row in rows.itertuples():
            amax = np.sort(np.asarray(row.channel_amax, dtype=float))[::-1]
            amax = np.log2(amax[amax > 0])
            axes.plot(np.arange(1, len(amax) + 1), amax, color=colors.to_rgba(row.layer_idx), lw=0.8)
        axes.set_xscale("log")
    set_exponent_axis(panels.first, *panels.first.get_ylim(), count=6, axis="y")
    panels.label(x="channels, largest first", y="amax of a channel")
    color_bar(page, colors, list(panels.of.values()), "layer")
    return page


def _numbered(study: Study, quant_type: str, symbols: tuple[str, ...]) -> pandas.DataFrame:
    frame = study.of_type(quant_type)
    stream = (frame["layer_type"] == _STREAM) & (frame["operation"] == "forward")
    frame = frame[frame["symbol"].isin(symbols) | stream]
    frame = frame[frame["layer_idx"].notna() & (frame["amax"] > 0)]
    frame = frame[has_items(frame["channel_amax"])]
    return frame[frame.groupby("site")["layer_idx"].transform("nunique") > 1] if stream.any() else frame


def _draw_surface(axes: Any, surface: Surface) -> None:
    """`axes` are matplotlib's three-dimensional ones."""
    values, place, (token, channel) = surface.values, surface.place, surface.peak
    tokens = np.linspace(0, surface.tokens, values.shape[0])
    channels = np.linspace(0, surface.channels, values.shape[1])
    x, y = np.meshgrid(channels, tokens)
    axes.plot_surface(x, y, values, cmap=SEQUENTIAL, rstride=1, cstride=1, linewidth=0, antialiased=False)
    peak = f"{numbers.magnitude(float(values.max()))} at token {token}, channel {channel}"
    axes.set_title(f"{place.site}, layer {place.layer}: {peak}")
    axes.set_xlabel("channel", labelpad=-4)
    axes.set_ylabel("token", labelpad=-4)
    axes.tick_params(pad=-2, labelsize=6)
    axes.set_box_aspect((1.5, 1.2, 0.75), zoom=1.2)
    axes.view_init(elev=28, azim=-58)
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.set_pane_color((1, 1, 1, 0))


def _draw_channels(page: Figure, axes: Axes, frame: pandas.DataFrame) -> None:
    from matplotlib.colors import Normalize

    layers, channels, image = channels_by_layer(frame, _IMAGE_TILES)
    with np.errstate(divide="ignore"):
        values = np.ma.masked_invalid(np.log2(image))
    darkest, brightest = np.quantile(values.compressed(), [_DARKEST, 1.0])
    extent = (0, channels, len(layers) - 0.5, -0.5)
    style: dict[str, Any] = {"aspect": "auto", "cmap": SEQUENTIAL, "norm": Normalize(darkest, brightest)}
    drawn = axes.imshow(values, extent=extent, **style)
    note_right(axes, _peak_text(frame), MUTED)
    set_layer_places(axes, layers, "y", count=5)
    axes.grid(visible=False)
    bar = color_bar(page, drawn, axes, "", aspect=14, pad=0.01, extend="min")
    ticks = exponent_ticks(float(darkest), float(brightest), 4)
    bar.set_ticks(ticks, labels=[numbers.power_of_two(tick) for tick in ticks])


def _name_channels(axes: Axes, channels: list[int]) -> None:
    """A red arrow from above to each channel, with its number."""
    from matplotlib.patheffects import withStroke

    for channel in channels[:_MOST_NAMED]:
        place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "color": ALARM, "clip_on": False}
        axes.plot(channel + 0.5, 0.955, "v", ms=5, mec="white", mew=0.6, **place)
        outline: dict[str, Any] = {"path_effects": [withStroke(linewidth=1.6, foreground="white")]}
        right = channel > sum(axes.get_xlim()) / 2
        side: dict[str, Any] = {"ha": "right" if right else "left", "va": "center", "fontsize": 7, "fontweight": "bold"}
        text = f"{channel}   " if right else f"   {channel}"
        axes.text(channel + 0.5, 0.93, text, **place, **side, **outline)


def _peak_text(frame: pandas.DataFrame) -> str:
    row = frame.loc[frame["amax"].idxmax()]
    channel = int(np.nanargmax(np.asarray(row["channel_amax"], dtype=float)))
    return f"largest {numbers.magnitude(row['amax'])} in layer {int(row['layer_idx'])}, channel {channel}"
