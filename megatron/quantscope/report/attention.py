"""attention_maps/: attention as it was captured, or recomputed from the captured q and k."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron.quantscope.analysis.attention import AttentionView
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.report.axes import make_image_axes, set_layer_places
from megatron.quantscope.report.page import new_page
from megatron.quantscope.report.panels import add_panels, color_bar
from megatron.quantscope.report.style import SEQUENTIAL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_HEADS = 12
_LEAST_PROBABILITY = 1e-4
_RECOMPUTED = "Recomputed as softmax(scale q k^T), causal, from the captured high-precision q and k"
_CAPTURED = "As the run's softmax gave it, captured"
_NUMBERS = {
    "Entropy, bits": ("entropy_bits", None),
    "Share of p on the first token": ("first_token", 1.0),
    "Largest |score| before softmax": ("largest_score", None),
}
"""Panel -> field of `AttentionView` and the upper end of its colours, None: the largest value."""


def draw_maps(study: Study, quant_type: str) -> Figure | None:
    """Every head of the first, the middle and the last layer."""
    views = _views(study, quant_type)
    if not views:
        return None
    chosen = [views[place] for place in sorted({0, len(views) // 2, len(views) - 1})]
    heads = min(_MOST_HEADS, max(len(view.maps) for view in chosen))
    page = new_page(
        1.5 + 1.3 * heads,
        0.4 + 1.35 * len(chosen),
        title="Attention of the first, middle and last layer",
        note=f"{_source(chosen)}; {chosen[0].pair.where}. A row is a query, a column a key; max-pooled. A bright left "
        "edge is an attention sink.",
        study=study,
        quant_type=quant_type,
    )
    grid = page.subplots(len(chosen), heads, squeeze=False)
    for row, view in zip(grid, chosen, strict=True):
        drawn = _draw_heads(row, view)
        row[0].set_ylabel(f"layer {view.pair.layer}", fontweight="bold")
    for head, axes in enumerate(grid[0]):
        axes.set_title(f"head {head}", fontsize=7.5, fontweight="normal")
    color_bar(page, drawn, list(grid.flat), "p", pad=0.01, extend="min")
    return page


def draw_heads(study: Study, quant_type: str) -> Figure | None:
    """Images of layers by heads: entropy, share of the first token, largest score."""
    views = _views(study, quant_type)
    if not views:
        return None
    heads = max(len(view.maps) for view in views)
    page = new_page(
        1.0 + 3 * max(2.1, 0.26 * heads + 1.2),
        0.45 + 0.13 * max(len(views), 12),
        title="What every attention head does",
        note=f"{_source(views)}; mean over the queries of the first micro-batch. Low entropy is sharp attention; "
        "scores that grow with training are an early sign of divergence.",
        study=study,
        quant_type=quant_type,
    )
    panels = add_panels(page, list(_NUMBERS), len(_NUMBERS), sharey=True)
    for title, (field, highest) in _NUMBERS.items():
        axes = panels.of[title]
        image = np.full((len(views), heads), np.nan)
        for row, view in enumerate(views):
            values = getattr(view, field)
            image[row, : len(values)] = values
        drawn = axes.imshow(image, aspect="auto", cmap=SEQUENTIAL, vmin=0, vmax=highest)
        axes.set_xticks(range(0, heads, max(1, -(-heads // _MOST_HEADS))))
        axes.grid(visible=False)
        color_bar(page, drawn, axes, "", aspect=25, pad=0.02)
    set_layer_places(panels.first, [view.pair.layer for view in views], "y")
    panels.label(x="head", y="layer")
    return page


def _views(study: Study, quant_type: str) -> list[AttentionView]:
    views = [view for view in study.attention if view.pair.quant_type == quant_type]
    return sorted(views, key=lambda view: view.pair.layer)


def _source(views: list[AttentionView]) -> str:
    """Where the probabilities come from."""
    captured = [view for view in views if not view.recomputed]
    if captured and len(captured) < len(views):
        return f"{_CAPTURED} in {len(captured)} layers; in the others recomputed from q and k"
    return _CAPTURED if captured else _RECOMPUTED


def _draw_heads(row: npt.NDArray[np.object_], view: AttentionView) -> Any:
    """One layer's heads, a panel each; returns an image for the colour bar."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    colors = colormaps[SEQUENTIAL].with_extremes(bad="white")  # masked keys
    for axes in row[len(view.maps) :]:
        axes.set_visible(False)
    for axes, p in zip(row, view.maps, strict=False):
        shown = np.ma.masked_less_equal(p, 0).clip(_LEAST_PROBABILITY, 1)
        drawn = axes.imshow(shown, norm=LogNorm(_LEAST_PROBABILITY, 1), cmap=colors)
        axes.set(xticks=[], yticks=[])
        make_image_axes(axes)
    return drawn
