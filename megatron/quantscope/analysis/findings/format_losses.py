"""What a format takes from the operands: values clipped or lost to Inf, values and whole blocks that become zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.quantscope.analysis.findings.finding import CRITICAL, NOTE, WARNING, Finding, Place, figure_path
from megatron.quantscope.analysis.findings.formats_tried import SECOND, formats_of, treatments_with_uses
from megatron.quantscope.analysis.findings.reference import GaussianFigures, gaussian
from megatron.quantscope.analysis.findings.words import layers, listed, percent, title_of
from megatron.quantscope.analysis.study import Study
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
        whole: Of a site and layer's sums, what it is a percentage of.
        gaussian: What the format takes of Gaussian data in percent.
        floor: The least threshold in percent.
        does: The sentence's verb and object: "of fc1.dy" comes before, where after.
        metric: Of the page.
        figure: Topic and name.
        worth: What is at stake, a sentence.
    """

    kind: str
    parts: tuple[str, ...]
    whole: Callable[[pandas.DataFrame], pandas.Series]
    gaussian: Callable[[GaussianFigures], float]
    floor: float
    does: str
    metric: str
    figure: tuple[str, str]
    worth: str


def _finite(sums: pandas.DataFrame) -> pandas.Series:
    return sums["count"] - sums["nan"] - sums["inf"]


LOSSES = (
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
        whole=lambda sums: _finite(sums) - sums["zero"],
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
        whole=lambda sums: sums["blocks"] - sums["zero_blocks"],
        gaussian=lambda _: 0.0,
        floor=_LEAST_DEAD,
        does="of the blocks of 32 become zero altogether",
        metric="dead_blocks",
        figure=("layer_analysis", "underflow"),
        worth="Nothing of such a block reaches the GEMM.",
    ),
)


def find_format_losses(study: Study) -> Iterator[Finding]:
    """At most one finding a type, format and kind of loss."""
    for quant_type in study.types:
        frame = study.of_type(quant_type)
        operands = frame[frame["operand"] & (frame["count"] > 0) & (frame["symbol"] != _PROBABILITIES)]
        for name in formats_of(study, quant_type):
            for loss in LOSSES:
                cells = [_cells(operands, treatment, loss) for treatment in treatments_with_uses(study, name)]
                finding = _finding(quant_type, name, loss, [cell for cell in cells if cell is not None])
                if finding is not None:
                    yield finding


def _cells(operands: pandas.DataFrame, treatment: str, loss: _Loss) -> pandas.DataFrame | None:
    """[(site, layer_idx)]: `percent`, `lost` and `treatment` of every site and layer; None without such columns."""
    columns = [f"{treatment}.{part}" for part in loss.parts]
    needed = [
        "count",
        "nan",
        "inf",
        "zero",
        *(name for name in ("blocks", "zero_blocks") if loss.kind == "dead_blocks"),
    ]
    if not set(columns) | set(needed) <= set(operands.columns):
        return None
    applies = operands[operands[columns].notna().all(axis=1)]
    if applies.empty:
        return None
    sums = applies.groupby(["site", "layer_idx"], dropna=False)[[*needed, *columns]].sum()
    lost = sums[f"{treatment}.lost"] if "lost" in loss.parts else 0 * sums["count"]
    hit, whole = sums[columns].sum(axis=1), loss.whole(sums)
    cells = sums.assign(hit=hit, whole=whole, percent=100 * hit / whole, lost=lost, treatment=treatment)
    return cells[whole > 0][["hit", "whole", "percent", "lost", "treatment"]].reset_index()


def _finding(quant_type: str, name: str, loss: _Loss, found: list[pandas.DataFrame]) -> Finding | None:
    import pandas

    if not found:
        return None
    cells = pandas.concat(found)
    ordinary = loss.gaussian(gaussian(name))
    least = max(loss.floor, _TIMES_GAUSSIAN * ordinary)
    chance = _scatter(least, cells["whole"]) if ordinary > 0 else 0.0
    notable = cells[(cells["percent"] >= least + chance) | (cells["lost"] > 0)]
    if notable.empty:
        return None
    return _told(quant_type, name, loss, least, notable.sort_values("percent", ascending=False))


def _told(quant_type: str, name: str, loss: _Loss, least: float, notable: pandas.DataFrame) -> Finding:
    worst, lost = notable.iloc[0], int(notable["lost"].sum())
    layer = None if worst["layer_idx"] != worst["layer_idx"] else int(worst["layer_idx"])
    place = f"{worst['site']}{'' if layer is None else f' of layer {layer}'}"
    says = f"{lost:,} values become Inf or NaN, most" if lost else f"{percent(worst['percent'])} {loss.does}"
    return Finding(
        kind=loss.kind,
        severity=CRITICAL if lost else WARNING if worst["percent"] >= _SEVERE_PERCENT else NOTE,
        title=f"{title_of(name)}: {says} in {place}",
        text=_text(loss, least, notable, lost),
        numbers={
            "percent": float(worst["percent"]),
            "threshold_percent": least,
            "elements": int(notable["hit"].sum()),
            "lost": lost,
            "sites": int(notable["site"].nunique()),
        },
        place=Place(quant_type=quant_type, site=worst["site"], layer=layer),
        metric=loss.metric,
        format=name,
        figure=figure_path(*loss.figure, quant_type),
        weight=float(worst["percent"]) / least,
    )


def _text(loss: _Loss, least: float, notable: pandas.DataFrame, lost: int) -> str:
    threshold = percent(least)
    if least > loss.floor:
        threshold += f", {_TIMES_GAUSSIAN:g} times what it takes of Gaussian data,"
    where = [_where(rows) for _, rows in notable.groupby(["site", "treatment"], sort=False)]
    sentences = [f"More than {threshold} in {listed(where, _MOST_SITES)}.", loss.worth]
    if lost:
        sentences.append(f"{lost:,} finite values become Inf or NaN.")
    return " ".join(sentences)


def _scatter(limit: float, elements: pandas.Series) -> pandas.Series:
    """By how much a percentage of so many elements may be off by chance: a block's elements share one fate."""
    share, blocks = limit / 100, elements / MX_BLOCK
    return 100 * _DEVIATIONS * (share * (1 - share) / blocks) ** 0.5


def _where(rows: pandas.DataFrame) -> str:
    """One site under one treatment: `fc1.dy in layers 3-28 (12 %)`."""
    gemm = " in its second GEMM" if rows["treatment"].iloc[0].endswith(SECOND) else ""
    share = percent(100 * rows["hit"].sum() / rows["whole"].sum())
    numbered = rows["layer_idx"].dropna()
    place = f" in {layers(int(layer) for layer in numbered)}" if len(numbered) else ""
    return f"{rows['site'].iloc[0]}{gemm}{place} ({share})"
