"""The second look at a few tensors, once the summaries have said which: attention and surfaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.quantscope.analysis.attention import attention_pairs, view_attention
from megatron.quantscope.analysis.surfaces import surface_places, view_surface
from megatron.quantscope.analysis.tables import RECORD_COLUMNS, summary_columns
from megatron.quantscope.analysis.workers import Workers

if TYPE_CHECKING:
    import pandas


def collect_details(summary: pandas.DataFrame, workers: Workers) -> dict[str, list[Any]]:
    """Read what the detailed figures need: the fields `attention` and `surfaces` of a `Study`.

    What can not be read is left out; the scan has listed it. So are rows of which only statistics were kept.
    """
    lists = [name for name, kind in summary_columns(()).items() if kind.startswith("list<")]
    stored = [name for name in lists if name in summary and name not in RECORD_COLUMNS]
    summary = summary[summary["file"].notna()].drop(columns=stored)
    if summary.empty:
        return {}
    views = {
        "attention": workers.map(view_attention, attention_pairs(summary)),
        "surfaces": workers.map(view_surface, surface_places(summary)),
    }
    return {name: [view for view in found if view is not None] for name, found in views.items()}
