"""NaN and Inf: how many, and where they appear first in the order of execution.

A rank counts its rows in the order in which it computed them. Counters of different ranks say nothing of each other: a
later pipeline stage begins at 1 too, with what the stage before it made. Of several ranks the order is that in which
values flow: by micro-batch, forward before backward, up the layers and down again; the counter within a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.quantscope.analysis.findings.finding import CRITICAL, Finding, Place, figure_path
from megatron.quantscope.analysis.findings.words import counted, layers, listed, title_of
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.capture.metadata import BACKWARD

if TYPE_CHECKING:
    import pandas

_BEFORE_LAYERS = "embedding"  # in the names of modules that stand before the layers; others without a layer follow


def find_nonfinite(study: Study) -> Iterator[Finding]:
    """One finding a type whose tensors hold NaN or Inf."""
    for quant_type in study.types:
        frame = study.of_type(quant_type)
        spoilt = frame[frame["nan"] + frame["inf"] > 0]
        if len(spoilt):
            yield _finding(quant_type, in_order(spoilt, several_ranks=frame["rank"].nunique() > 1))


def in_order(rows: pandas.DataFrame, *, several_ranks: bool) -> pandas.DataFrame:
    """Rows in the order of execution."""
    if not several_ranks:
        return rows.sort_values(["iteration", "counter"])
    backward = rows["operation"] == BACKWARD
    before = rows["module"].fillna("").str.contains(_BEFORE_LAYERS, regex=False)
    outside = before.map({True: -math.inf, False: math.inf})
    depth = rows["layer_idx"].astype(float).fillna(outside)
    keys = rows[["iteration", "micro_batch", "counter", "rank"]].assign(
        backward=backward, depth=depth.mask(backward, -depth)
    )
    return rows.loc[keys.sort_values(["iteration", "micro_batch", "backward", "depth", "counter", "rank"]).index]


def _finding(quant_type: str, spoilt: pandas.DataFrame) -> Finding:
    first = spoilt.iloc[0]
    place = _place(first, quant_type)
    where = _where(place)
    sites = [
        f"{site} ({layers(int(layer) for layer in rows['layer_idx'].dropna())})"
        if rows["layer_idx"].notna().any()
        else site
        for site, rows in spoilt.groupby("site", sort=False)
    ]
    nan, inf = int(spoilt["nan"].sum()), int(spoilt["inf"].sum())
    return Finding(
        kind="nonfinite",
        severity=CRITICAL,
        title=f"NaN or Inf in {counted(len(spoilt), 'tensor')} of the {title_of(quant_type)} run, first in {where}",
        text=f"{nan:,} NaN and {inf:,} Inf. The first tensor of the execution that holds any is {where}, in the "
        f"{first['operation']} pass, with {int(first['nan']):,} NaN and {int(first['inf']):,} Inf; everything captured "
        f"before it is finite. They are in {listed(sites)}.",
        numbers={
            "tensors": len(spoilt),
            "nan": nan,
            "inf": inf,
            "first_nan": int(first["nan"]),
            "first_inf": int(first["inf"]),
        },
        place=place,
        metric="nonfinite",
        figure=figure_path("statistics", "sites", quant_type),
        weight=float(len(spoilt)),
    )


def _place(row: pandas.Series, quant_type: str) -> Place:
    known = {
        field: int(row[column])
        for field, column in {
            "layer": "layer_idx",
            "rank": "rank",
            "iteration": "iteration",
            "micro_batch": "micro_batch",
        }.items()
        if row[column] == row[column] and row[column] is not None
    }
    return Place(quant_type=quant_type, site=row["site"], **known)


def _where(place: Place) -> str:
    named = {"layer": place.layer, "iteration": place.iteration, "rank": place.rank}
    return ", ".join([str(place.site), *(f"{name} {value}" for name, value in named.items() if value is not None)])
