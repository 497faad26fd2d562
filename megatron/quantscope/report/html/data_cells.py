"""The cells of the page: one a site of a layer of a run, at an iteration and a rank, micro-batches put together.

Cells are put together exactly, from sums (`aggregate.merged`). Where there are more than a page can hold, ranks become
one first, then iterations, and the page says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron.quantscope.analysis.aggregate import as_trained, merged, treatments_of
from megatron.quantscope.analysis.format_errors import POW2_FORMATS
from megatron.quantscope.analysis.roles import site_order
from megatron.quantscope.analysis.tables import live_column
from megatron.quantscope.report.html.data_formats import UNSCALED, format_of
from megatron.quantscope.report.html.encode import numbers, sqnr

if TYPE_CHECKING:
    import pandas

    from megatron.quantscope.analysis.study import Study

Part = dict[str, Any]
Floats = npt.NDArray[np.float64]

MOST_CELLS = 8_000
OUTSIDE = -1
"""The layer of modules that are outside the layers, by number and by place on the axis."""

KEYS = ("quant_type", "iteration", "rank", "site", "layer_idx")
_MERGEABLE = ("rank", "iteration")  # in this order
_UNKNOWN = -1.0  # in KEYS, where a table has null


@dataclass(frozen=True, kw_only=True)
class Cells:
    """The cells and the rows that they are made of.

    Attributes:
        rows: The summary table, errors as training makes them, and the number of each row's cell as `cell`.
        groups: One row a cell, in order: `KEYS`, and the columns of `aggregate.merged`.
        merged: The coordinates of `KEYS` that were put together to keep the page small.
        types: In the order of the study.
    """

    rows: pandas.DataFrame
    groups: pandas.DataFrame
    merged: tuple[str, ...]
    types: Sequence[str]

    def __len__(self) -> int:
        return len(self.groups)

    @cached_property
    def treatments(self) -> list[str]:
        """The names of the treatments that were tried."""
        return treatments_of(self.rows)

    @cached_property
    def axes(self) -> dict[str, list[Any]]:
        """The values of each axis in the order in which the page shows them; null: not told, or all together."""
        values = {
            name: [_known(value) for value in sorted(self.groups[key].unique())]
            for name, key in (("iterations", "iteration"), ("ranks", "rank"))
        }
        return {
            "types": list(self.types),
            **values,
            "layers": sorted(int(layer) for layer in self.groups["layer_idx"].unique() if layer != OUTSIDE),
            "sites": sorted(self.groups["site"].unique(), key=site_order),
        }

    @cached_property
    def places(self) -> dict[tuple[str, str, int], list[int]]:
        """(type, site, layer) -> its cells."""
        found: dict[tuple[str, str, int], list[int]] = {}
        columns = (self.groups[key] for key in ("quant_type", "site", "layer_idx"))
        for cell, (quant_type, site, layer) in enumerate(zip(*columns, strict=True)):
            found.setdefault((quant_type, site, int(layer)), []).append(cell)
        return found


def cells_of(study: Study, most: int = MOST_CELLS) -> Cells:
    """Put the rows of a study together into cells, at most about `most` of them."""
    rows = as_trained(_with_unscaled(study.summary))
    keys = {
        "iteration": rows["iteration"].astype(float).fillna(_UNKNOWN),
        "rank": rows["rank"].astype(float).fillna(_UNKNOWN),
        "layer_idx": rows["layer_idx"].astype(float).fillna(OUTSIDE),
    }
    rows = rows.assign(**keys)
    together: tuple[str, ...] = ()
    for coordinate in _MERGEABLE:
        if rows[coordinate].nunique() > 1 and rows.groupby(list(KEYS)).ngroups > most:
            rows[coordinate] = _UNKNOWN
            together += (coordinate,)
    rows = rows.sort_values(list(KEYS), key=lambda column: _ordered(column, study.types), kind="stable")
    rows["cell"] = rows.groupby(list(KEYS), sort=False).ngroup()
    first = rows.drop_duplicates("cell").set_index("cell")[list(KEYS)]
    groups = merged(rows, "cell").join(first)
    return Cells(rows=rows, groups=groups, merged=together, types=study.types)


def cell_columns(cells: Cells) -> Part:
    """The contract's `cells`: for each cell its place on the axes, and its values by metric and treatment."""
    groups, axes = cells.groups, cells.axes
    places = {
        name: [index[_known(value)] for value in groups[key]]
        for name, key, index in (
            ("type", "quant_type", _index(axes["types"])),
            ("iteration", "iteration", _index(axes["iterations"])),
            ("rank", "rank", _index(axes["ranks"])),
            ("site", "site", _index(axes["sites"])),
            ("layer", "layer_idx", _index(axes["layers"]) | {None: OUTSIDE}),
        )
    }
    values = _plain_values(cells)
    for name in cells.treatments:
        values |= _tried_values(groups, name)
        if format_of(name).block:
            values[f"dead_blocks/{name}"] = numbers(_dead_percent(cells, name))
    known = {key: column for key, column in values.items() if any(value is not None for value in column)}
    return places | {"values": known}


def _plain_values(cells: Cells) -> Part:
    groups, rows = cells.groups, cells.rows
    ratio = (rows["amax"] / rows["median_magnitude"]).where(rows["median_magnitude"] > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        crest = np.log2(groups["amax"] / groups["rms"])
    same = {name: groups[name] for name in ("amax", "rms", "mean", "kurtosis", "zero_percent", "nonfinite")}
    columns = same | {"crest": crest, "top_ratio": ratio.groupby(rows["cell"]).max()}
    return {name: numbers(column.to_numpy(float)) for name, column in columns.items()}


def _tried_values(groups: pandas.DataFrame, name: str) -> Part:
    tried = {part: groups[f"{name}.{part}"] for part in ("sqnr_db", "relative_error", "lost")}
    found = {part: groups[f"{name}.{part}_percent"] for part in ("underflow", "saturated", "lost")}
    found["relative_error"] = (100 * tried["relative_error"]).where(tried["lost"] == 0)
    columns = {f"{part}/{name}": numbers(column.to_numpy(float)) for part, column in found.items()}
    return columns | {f"sqnr/{name}": sqnr(tried["sqnr_db"].to_numpy(float))}


def _dead_percent(cells: Cells, name: str) -> Floats:
    """[cells]: the dead blocks, of the format's blocks along this GEMM that hold anything but zeros."""
    live = cells.rows[live_column(name)].astype(float).groupby(cells.rows["cell"]).sum()
    dead: Floats = (100 * cells.groups[f"{name}.dead_blocks"] / live.where(live > 0)).to_numpy(float)
    return dead


def _with_unscaled(summary: pandas.DataFrame) -> pandas.DataFrame:
    """The table with what the formats of `POW2_FORMATS` do without a scale as treatments of their own."""
    import pandas

    unscaled = {
        column.replace(name, f"{name}_{UNSCALED}", 1): summary[column]
        for name in POW2_FORMATS
        for column in summary
        if column.startswith(f"{name}.")
    }
    return pandas.concat([summary, pandas.DataFrame(unscaled)], axis=1)


def _ordered(column: pandas.Series, types: Sequence[str]) -> pandas.Series:
    order = {"quant_type": _index(types).get, "site": site_order}.get(str(column.name))
    return column.map(order) if order else column


def _index(values: Sequence[Any]) -> dict[Any, int]:
    return {value: place for place, value in enumerate(values)}


def _known(value: Any) -> Any:
    """A coordinate as the axes have it: whole, None where there is none."""
    if isinstance(value, str):
        return value
    return None if value == _UNKNOWN else int(value)
