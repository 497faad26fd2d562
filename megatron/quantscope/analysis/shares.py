"""What a capture consists of: rows, files, bytes and elements by any of its fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas


def shares(index: pandas.DataFrame, summary: pandas.DataFrame, column: str) -> pandas.DataFrame:
    """One row a value of `column`, the largest first: rows, files, bytes, elements, and percent of all elements.

    Args:
        index: The index table: all rows, also those that refer to another row's file.
        summary: The summary table: a row a file.
        column: A column of both; rows without a value count as "unknown".
    """
    keys = index[column].fillna("unknown").rename(column)
    files = summary.groupby(summary[column].fillna("unknown"))
    result = keys.value_counts(sort=False).to_frame("rows")
    for name, column_ in (("files", "file"), ("bytes", "bytes"), ("elements", "count")):
        result[name] = (files[column_].nunique() if name == "files" else files[column_].sum()).reindex(result.index)
    result = result.fillna(0).astype("int64")
    result["percent"] = 100 * result["elements"] / max(1, int(result["elements"].sum()))
    return result.sort_values("elements", ascending=False)
