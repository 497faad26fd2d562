"""The comparison of the runs with the baseline: a row a compared tensor, and where each run parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.quantscope.analysis.comparison import partings
from megatron.quantscope.report.html.data_cells import OUTSIDE
from megatron.quantscope.report.html.encode import numbers, sqnr

if TYPE_CHECKING:
    import pandas

    from megatron.quantscope.analysis.study import Study

Part = dict[str, Any]

MOST_ROWS = 20_000
_TEXTS = ("run", "site", "family", "operation")
_NUMBERS = ("iteration", "micro_batch", "rank", "order", "cosine", "relative_l2", "max_error")


def comparison(study: Study) -> Part | None:
    """The contract's `comparison`; None where there is nothing to compare."""
    table = study.comparison
    if table is None or table.empty:
        return None
    shown, left_out = _small_enough(table)
    columns: Part = {name: [str(value) for value in shown[name]] for name in _TEXTS}
    columns |= {name: numbers(shown[name].to_numpy(float)) for name in _NUMBERS}
    columns["layer"] = [int(layer) for layer in shown["layer_idx"].astype(float).fillna(OUTSIDE)]
    columns["equal"] = [bool(equal) for equal in shown["equal"]]
    columns["sqnr_db"] = sqnr(shown["sqnr_db"].to_numpy(float))
    return {
        "baseline": str(table["baseline"].iloc[0]),
        "columns": columns,
        "parting": [
            {"run": found.run, "kind": found.kind, "site": found.site, "layer": found.layer, "text": found.text}
            for found in partings(table)
        ],
        "left_out": left_out,
    }


def _small_enough(table: pandas.DataFrame) -> tuple[pandas.DataFrame, str | None]:
    """Rows of the first iteration, then of the first micro-batch and rank alone, where there are too many."""
    kept = []
    for column in ("iteration", "micro_batch", "rank"):
        if len(table) > MOST_ROWS and table[column].nunique() > 1:
            first = table[column].min()
            table = table[table[column] == first]
            kept.append(f"{column.replace('_', '-')} {first:.0f}")
    return table, f"Of {', '.join(kept)} alone, to keep this file small." if kept else None
