"""The second look at a few tensors, once the summaries have said which: attention, surfaces, runs side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.quantscope.analysis.attention import attention_pairs, view_attention
from megatron.quantscope.analysis.divergence import compare_pair, divergence_pairs
from megatron.quantscope.analysis.study import ordered_types
from megatron.quantscope.analysis.surfaces import surface_places, view_surface
from megatron.quantscope.analysis.workers import Workers

if TYPE_CHECKING:
    import pandas


def collect_details(summary: pandas.DataFrame, workers: Workers) -> dict[str, list[Any]]:
    """Read what the detailed figures need: the fields `attention`, `surfaces` and `divergences` of a `Study`.

    What can not be read is left out; the scan has listed it.
    """
    baseline = ordered_types(summary["quant_type"].unique())[0]
    views = {
        "attention": workers.map(view_attention, attention_pairs(summary)),
        "surfaces": workers.map(view_surface, surface_places(summary)),
        "divergences": workers.map(compare_pair, divergence_pairs(summary, baseline)),
    }
    return {name: [view for view in found if view is not None] for name, found in views.items()}
