"""What formats do to tensors, as text: every figure of one tensor, or one figure of many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.quantscope.analysis.roles import site_order
from megatron.quantscope.columns import aligned
from megatron.quantscope.report import numbers

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Figure:
    """A column of `analysis.what_if`: its head, and how its numbers are written."""

    title: str
    text: Callable[[Any], str]


def _count(value: Any) -> str:
    return "-" if value != value else f"{int(value):,}"


FIGURES: Mapping[str, Figure] = {
    "sqnr_db": Figure("SQNR dB", numbers.decibels),
    "relative_error": Figure("relative error", numbers.magnitude),
    "underflow_percent": Figure("underflow", numbers.percent),
    "saturated_percent": Figure("saturated", numbers.percent),
    "lost_percent": Figure("lost", numbers.percent),
    "dead_blocks": Figure("dead blocks", _count),
}
_NO_GEMM = "-"


def all_figures(table: pandas.DataFrame) -> str:
    """A line a GEMM, format and rule, with all figures.

    Args:
        table: Of `what_if`, about one tensor.
    """
    heads = ("GEMM", "format", *(figure.title for figure in FIGURES.values()))
    lines = [
        (_gemm(row), _treatment(row), *(figure.text(row[name]) for name, figure in FIGURES.items()))
        for row in table.to_dict("records")
    ]
    return aligned([heads, *lines], right=range(2, len(heads)))


def one_figure(table: pandas.DataFrame, by: Sequence[str], name: str) -> str:
    """A line a group and GEMM, a column a format.

    Args:
        table: Of `what_if`, by `by`.
        by: The columns that name a group.
        name: Which figure.
    """
    cells: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in table.to_dict("records"):
        place = (*(row[column] for column in by), _gemm(row))
        cells.setdefault(place, {})[_treatment(row)] = FIGURES[name].text(row[name])
    columns = list(dict.fromkeys(column for line in cells.values() for column in line))
    heads = (*by, "GEMM", *columns)
    lines = [
        (*map(_cell, place), *(cells[place].get(column, "-") for column in columns)) for place in _ordered(cells, by)
    ]
    return aligned([heads, *lines], right=range(len(by) + 1, len(heads)))


def _ordered(places: Mapping[tuple[Any, ...], object], by: Sequence[str]) -> list[tuple[Any, ...]]:
    """Sites along the forward pass; everything else as the table has it."""
    if "site" not in by:
        return list(places)
    at = list(by).index("site")
    return sorted(places, key=lambda place: (*map(str, place[:at]), site_order(place[at])))


def _treatment(row: Mapping[str, Any]) -> str:
    rule = "" if row["scale_rule"] == "floor" else f" {row['scale_rule']}"
    return f"{row['format']}{rule}{' scaled' if row['scaled'] else ''}"


def _gemm(row: Mapping[str, Any]) -> str:
    return row["gemm"] if isinstance(row["gemm"], str) else _NO_GEMM


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "-" if value != value else f"{value:g}"
    return str(value)
