"""Where runs part from the baseline: the first tensors in the order of execution, as records with a sentence each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

BEGINS_TO_PART_DB = 40.0  # the error is 1 % of the signal
PARTED_DB = 20.0  # it is 10 %
EQUAL, NOT_EQUAL, BEGINS_TO_PART, PARTED = "equal", "not equal", "begins to part", "parted"
_THRESHOLDS = {BEGINS_TO_PART: BEGINS_TO_PART_DB, PARTED: PARTED_DB}


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The first tensor, in the order of the baseline's execution, at which something is so.

    Attributes:
        run, baseline: Labels.
        kind: "not equal": its bits differ; "begins to part", "parted": its SQNR is below `BEGINS_TO_PART_DB`,
            `PARTED_DB`; "equal": no tensor is not equal, and the place is empty.
        site, layer, rank, iteration, micro_batch, operation: Where; None where there is nothing or it is not known.
        order: Place in the execution; -1 for "equal".
        sqnr_db: Of that tensor.
        text: All of it in a sentence.
    """

    run: str
    baseline: str
    kind: str
    site: str | None = None
    layer: int | None = None
    rank: int | None = None
    iteration: int | None = None
    micro_batch: int | None = None
    operation: str | None = None
    order: int = -1
    sqnr_db: float = math.inf
    text: str


def partings(table: pandas.DataFrame) -> list[Parting]:
    """Where each run is first not equal, begins to part, and has parted; of a run that is equal throughout, that."""
    return [parting for _, rows in by_run(table) for parting in _partings_of(rows.sort_values("order", kind="stable"))]


def worst(table: pandas.DataFrame, count: int) -> pandas.DataFrame:
    """The rows of the lowest SQNR, the lowest first; of equal ones the earlier in the execution."""
    differing = table[~table["equal"]]
    return differing.sort_values(["sqnr_db", "order"], kind="stable").head(count)


def by_run(table: pandas.DataFrame) -> Iterator[tuple[str, pandas.DataFrame]]:
    """Label and rows of each run, as they follow each other."""
    for label, rows in table.groupby("run", sort=False):
        yield str(label), rows


def _partings_of(rows: pandas.DataFrame) -> Iterator[Parting]:
    run, baseline = rows.iloc[0]["run"], rows.iloc[0]["baseline"]
    differing = rows[~rows["equal"]]
    if differing.empty:
        text = f"{run}: all {len(rows)} tensors are equal to those of {baseline}, bit by bit."
        yield Parting(run=run, baseline=baseline, kind=EQUAL, text=text)
        return
    what = f"{len(differing)} of {len(rows)} tensors are not equal to those of {baseline}; the first is "
    yield _at(differing.iloc[0], NOT_EQUAL, what)
    for kind, threshold in _THRESHOLDS.items():
        below = rows[rows["sqnr_db"] < threshold]
        if len(below):
            yield _at(below.iloc[0], kind, f"the first SQNR below {threshold:g} dB is that of ")


def _at(row: pandas.Series, kind: str, what: str) -> Parting:
    numbers = {name: _number(row[name]) for name in ("rank", "iteration", "micro_batch")}
    layer = _number(row["layer_idx"])
    return Parting(
        run=row["run"],
        baseline=row["baseline"],
        kind=kind,
        site=row["site"],
        layer=layer,
        operation=row["operation"],
        order=int(row["order"]),
        sqnr_db=float(row["sqnr_db"]),
        text=f"{row['run']}: {what}{place_of(row)}, at {decibels(row['sqnr_db'])}.",
        **numbers,
    )


def place_of(row: pandas.Series) -> str:
    """`qkv.y of layer 0 (forward, iteration 0, micro-batch 0)`, with what is known of it."""
    layer = _number(row["layer_idx"])
    where = [row["operation"]]
    for name, title in (("iteration", "iteration"), ("micro_batch", "micro-batch"), ("rank", "rank")):
        number = _number(row[name])
        if number is not None:
            where.append(f"{title} {number}")
    return f"{row['site']}{'' if layer is None else f' of layer {layer}'} ({', '.join(where)})"


def decibels(value: float) -> str:
    """An SQNR in a sentence."""
    if math.isinf(value):
        return "equal values" if value > 0 else "an error without bound"
    return f"{value:.1f} dB"


def _number(value: Any) -> int | None:
    return None if value is None or value != value else int(value)
