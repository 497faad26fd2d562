"""What a format takes from the operands: values clipped or lost to Inf, values and whole blocks that become zero.

Blocks that become zero are told where their values are told: they are a sentence of the underflow of the same place.
By themselves they are a finding where the format has blocks of its own, and so few values that underflow is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron.quantscope.analysis.findings.finding import CRITICAL, NOTE, WARNING, Finding, Place, figure_path
from megatron.quantscope.analysis.findings.formats_tried import SECOND, formats_of, treatments_with_uses
from megatron.quantscope.analysis.findings.reference import GaussianFigures, gaussian
from megatron.quantscope.analysis.findings.words import layers, listed, percent, title_of
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.analysis.tables import live_column
from megatron.quantscope.formats import FORMATS
from megatron.quantscope.formats.catalog import MX_BLOCK

if TYPE_CHECKING:
    import pandas

_TIMES_GAUSSIAN = 2.0  # below twice what Gaussian data loses, a format does what it does to everything
_LEAST_UNDERFLOW = 1.0  # percent: fewer small values hardly move a GEMM's result
_LEAST_SATURATED = 0.1  # percent: few as they are, these are the largest values
_LEAST_DEAD = 0.1  # percent of the blocks
_DEVIATIONS = 3.0  # standard, that a small tensor has to be above a threshold
_SEVERE_PERCENT = 10.0  # from here on it is a warning
_MOST_SITES = 3  # that a sentence names
_PROBABILITIES = "p"  # most of them are next to zero as they should be, and a zero in their place changes nothing


@dataclass(frozen=True, kw_only=True)
class _Loss:
    """One way of losing values.

    Attributes:
        kind: Of finding.
        parts: What is counted: columns of a treatment.
        whole: Of a site and layer's sums and a treatment, what it is a percentage of.
        gaussian: What the format takes of Gaussian data in percent.
        floor: The least threshold in percent.
        does: The sentence's verb and object, `{block}` for the size of a block; a percentage comes before, where after.
        metric: Of the page.
        figure: Topic and name.
        worth: What is at stake, a sentence.
    """

    kind: str
    parts: tuple[str, ...]
    whole: Callable[[pandas.DataFrame, str], pandas.Series]
    gaussian: Callable[[GaussianFigures], float]
    floor: float
    does: str
    metric: str
    figure: tuple[str, str]
    worth: str


def _finite(sums: pandas.DataFrame, treatment: str = "") -> pandas.Series:
    return sums["count"] - sums["nan"] - sums["inf"]


SATURATION, UNDERFLOW, DEAD = LOSSES = (
    _Loss(
        kind="saturation",
        parts=("saturated", "lost"),
        whole=_finite,
        gaussian=lambda found: found.saturated_percent,
        floor=_LEAST_SATURATED,
        does="is beyond the largest value",
        metric="saturated",
        figure=("quantization_analysis", "saturation_by_layer"),
        worth="These are the largest values of their tensors.",
    ),
    _Loss(
        kind="underflow",
        parts=("underflow",),
        whole=lambda sums, _: _finite(sums) - sums["zero"],
        gaussian=lambda found: found.underflow_percent,
        floor=_LEAST_UNDERFLOW,
        does="becomes zero",
        metric="underflow",
        figure=("quantization_analysis", "underflow_by_layer"),
        worth="Large values in the same block, or in the same tensor, leave no room for the small ones.",
    ),
    _Loss(
        kind="dead_blocks",
        parts=("dead_blocks",),
        whole=lambda sums, treatment: sums[live_column(treatment)],
        gaussian=lambda _: 0.0,
        floor=_LEAST_DEAD,
        does="of the blocks of {block} become zero altogether",
        metric="dead_blocks",
        figure=("quantization_analysis", "underflow_by_layer"),
        worth="Nothing of such a block reaches the GEMM.",
    ),
)


_PLACE = ["site", "layer_idx"]


@dataclass(frozen=True, kw_only=True)
class _Notable:
    """Where one run loses more than it should in one way, under one format.

    Attributes:
        loss: The way.
        least: The threshold in percent.
        rows: A row a site, layer and treatment, the worst first: `hit` of `whole` in `percent`, and of these `lost`.
    """

    loss: _Loss
    least: float
    rows: pandas.DataFrame

    def only(self, mask: pandas.Series) -> _Notable:
        return replace(self, rows=self.rows[mask])


def find_format_losses(study: Study) -> Iterator[Finding]:
    """At most one finding a type, format and kind of loss."""
    for quant_type in study.types:
        frame = study.of_type(quant_type)
        operands = frame[frame["operand"] & (frame["count"] > 0) & (frame["symbol"] != _PROBABILITIES)]
        for name in formats_of(study, quant_type):
            treatments = treatments_with_uses(study, name)
            saturation, underflow, dead = (_notable(operands, name, treatments, loss) for loss in LOSSES)
            if saturation is not None:
                lost = saturation.rows["lost"] > 0
                yield (
                    _lost(quant_type, name, saturation.rows[lost])
                    if lost.any()
                    else _told(quant_type, name, saturation)
                )
            yield from _zeros(quant_type, name, underflow, dead)


def _notable(operands: pandas.DataFrame, name: str, treatments: Sequence[str], loss: _Loss) -> _Notable | None:
    import pandas

    found = [cells for treatment in treatments if (cells := _cells(operands, treatment, loss)) is not None]
    if not found:
        return None
    cells = pandas.concat(found, ignore_index=True)
    ordinary = loss.gaussian(gaussian(name))
    least = max(loss.floor, _TIMES_GAUSSIAN * ordinary)
    chance = _scatter(least, cells["whole"]) if ordinary > 0 else 0.0
    rows = cells[(cells["percent"] >= least + chance) | (cells["lost"] > 0)]
    if rows.empty:
        return None
    return _Notable(loss=loss, least=least, rows=rows.sort_values("percent", ascending=False))


def _cells(operands: pandas.DataFrame, treatment: str, loss: _Loss) -> pandas.DataFrame | None:
    """Of every site and layer `hit`, `whole`, `percent`, `lost` and `treatment`; None without such columns."""
    columns = [f"{treatment}.{part}" for part in loss.parts]
    needed = ["count", "nan", "inf", "zero", *([live_column(treatment)] if loss is DEAD else [])]
    if not set(columns) | set(needed) <= set(operands.columns):
        return None
    applies = operands[operands[columns].notna().all(axis=1)]
    if applies.empty:
        return None
    sums = applies.groupby(_PLACE, dropna=False)[[*needed, *columns]].sum()
    lost = sums[f"{treatment}.lost"] if "lost" in loss.parts else 0 * sums["count"]
    hit, whole = sums[columns].sum(axis=1), loss.whole(sums, treatment)
    cells = sums.assign(hit=hit, whole=whole, percent=100 * hit / whole, lost=lost, treatment=treatment)
    return cells[whole > 0][["hit", "whole", "percent", "lost", "treatment"]].reset_index()


def _zeros(quant_type: str, name: str, underflow: _Notable | None, dead: _Notable | None) -> Iterator[Finding]:
    """Values that become zero, with the blocks that do so altogether in the same places; and such blocks elsewhere."""
    if underflow is not None:
        told = _told(quant_type, name, underflow)
        if dead is not None:
            there = _places(dead.rows).isin(_places(underflow.rows))
            told, dead = _with_blocks(told, name, dead.rows[there]), dead.only(~there)
        yield told
    if dead is not None and len(dead.rows) and FORMATS[name].block:
        yield _told(quant_type, name, dead)


def _places(rows: pandas.DataFrame) -> pandas.Series:
    return rows["site"] + "/" + rows["layer_idx"].astype(str)


def _with_blocks(told: Finding, name: str, dead: pandas.DataFrame) -> Finding:
    if dead.empty:
        return told
    sentence = f"Whole blocks of {_block(name)} become zero in {listed(_by_site(dead), _MOST_SITES)}."
    numbers = {"dead_blocks": _largest_use(dead, "hit"), "dead_blocks_percent": float(dead["percent"].max())}
    return replace(told, text=f"{told.text} {sentence}", numbers={**told.numbers, **numbers})


def _told(quant_type: str, name: str, notable: _Notable) -> Finding:
    loss, worst = notable.loss, notable.rows.iloc[0]
    does = loss.does.format(block=_block(name))
    threshold = percent(notable.least)
    if notable.least > loss.floor:
        threshold += f", {_TIMES_GAUSSIAN:g} times what it takes of Gaussian data,"
    return Finding(
        kind=loss.kind,
        severity=WARNING if worst["percent"] >= _SEVERE_PERCENT else NOTE,
        title=f"{title_of(name)}: {percent(worst['percent'])} {does} in {_named(worst)}",
        text=f"More than {threshold} in {listed(_by_site(notable.rows), _MOST_SITES)}. {loss.worth}",
        numbers={
            "percent": float(worst["percent"]),
            "threshold_percent": notable.least,
            "blocks" if loss is DEAD else "elements": _largest_use(notable.rows, "hit"),
            "sites": int(notable.rows["site"].nunique()),
        },
        place=_place(quant_type, worst),
        metric=loss.metric,
        format=name,
        figure=figure_path(*loss.figure, quant_type),
        weight=float(worst["percent"]) / notable.least,
    )


def _lost(quant_type: str, name: str, rows: pandas.DataFrame) -> Finding:
    """Of rows that all lose values to Inf or NaN. A value that is lost in both its GEMMs is one."""
    by_place = rows.groupby(_PLACE, dropna=False, as_index=False)["lost"].max()
    by_place = by_place.sort_values("lost", ascending=False, kind="stable")
    worst, count = by_place.iloc[0], int(by_place["lost"].sum())
    where = [
        f"{site}{_in_layers(of_site)} ({int(of_site['lost'].sum()):,})"
        for site, of_site in by_place.groupby("site", sort=False)
    ]
    return Finding(
        kind=SATURATION.kind,
        severity=CRITICAL,
        title=f"{title_of(name)}: {count:,} values become Inf or NaN, {'most ' if len(by_place) > 1 else ''}in "
        f"{_named(worst)}",
        text=f"Finite values become Inf or NaN in {listed(where, _MOST_SITES)}. A GEMM that takes in one of them makes "
        "a whole row of its result Inf or NaN.",
        numbers={"lost": count, "most_lost": int(worst["lost"]), "sites": int(by_place["site"].nunique())},
        place=_place(quant_type, worst),
        metric="lost",
        format=name,
        figure=figure_path(*SATURATION.figure, quant_type),
        weight=float(len(by_place)),
    )


def _largest_use(rows: pandas.DataFrame, column: str) -> int:
    """The sum over places of the use that has most: what both GEMMs lose is lost once."""
    return int(rows.groupby(_PLACE, dropna=False)[column].max().sum())


def _block(name: str) -> int:
    return FORMATS[name].block or MX_BLOCK


def _scatter(limit: float, elements: pandas.Series) -> pandas.Series:
    """By how much a percentage of so many elements may be off by chance: a block's elements share one fate."""
    share, blocks = limit / 100, elements / MX_BLOCK
    return 100 * _DEVIATIONS * (share * (1 - share) / blocks) ** 0.5


def _place(quant_type: str, row: pandas.Series) -> Place:
    return Place(quant_type=quant_type, site=row["site"], layer=_layer(row))


def _layer(row: pandas.Series) -> int | None:
    return int(row["layer_idx"]) if row["layer_idx"] == row["layer_idx"] else None


def _named(row: pandas.Series) -> str:
    layer = _layer(row)
    return f"{row['site']}{'' if layer is None else f' of layer {layer}'}"


def _by_site(rows: pandas.DataFrame) -> list[str]:
    """Each site under each treatment: `fc1.dy in layers 3-28 (12 %)`."""
    return [_where(of_site) for _, of_site in rows.groupby(["site", "treatment"], sort=False)]


def _where(rows: pandas.DataFrame) -> str:
    gemm = " in its second GEMM" if rows["treatment"].iloc[0].endswith(SECOND) else ""
    share = percent(100 * rows["hit"].sum() / rows["whole"].sum())
    return f"{rows['site'].iloc[0]}{gemm}{_in_layers(rows)} ({share})"


def _in_layers(rows: pandas.DataFrame) -> str:
    numbered = rows["layer_idx"].dropna()
    return f" in {layers(int(layer) for layer in numbered)}" if len(numbered) else ""
