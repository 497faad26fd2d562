"""Runs against the baseline: where their tensors part, and what it does to the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from megatron.quantscope.analysis.findings.finding import CRITICAL, NOTE, WARNING, Finding, Place, figure_path
from megatron.quantscope.analysis.findings.words import listed, percent, title_of
from megatron.quantscope.analysis.losses import LOSS, loss_differences, losses_by_type
from megatron.quantscope.analysis.study import Study

if TYPE_CHECKING:
    import pandas

_PARTED_DB = 20.0  # an error of a tenth of the signal
_SEVERE_DB = 10.0  # of a third of it
_LEAST_LOSS = 0.5  # percent: below it can be the order of summation
_SEVERE_LOSS = 2.0  # percent: more than any published low-precision recipe gives away


def find_divergence(study: Study) -> Iterator[Finding]:
    """One finding a run whose results leave the baseline's."""
    table = study.comparison
    if table is None or table.empty:
        return
    results = table[(table["phase"] == "post") & table["sqnr_db"].notna()]
    for run, rows in results.groupby("run", sort=False):
        parted = rows[rows["sqnr_db"] < _PARTED_DB].sort_values(["iteration", "micro_batch", "order"])
        if len(parted):
            yield _divergence(str(run), rows, parted.iloc[0])


def find_loss_differences(study: Study) -> Iterator[Finding]:
    """One finding a run whose loss is not finite, or is not the baseline's."""
    for quant_type in study.types:
        for iteration, scalars in sorted(study.commits.get(quant_type, {}).items()):
            if not math.isfinite(scalars.get(LOSS, 0.0)):
                yield _lost(quant_type, iteration, scalars[LOSS])
                break
    losses = losses_by_type(study.commits, study.types)
    if len(losses) > 1:
        baseline = next(iter(losses))
        differences = {
            name: (max(found), found[max(found)])
            for name, found in loss_differences(losses, baseline).items()
            if name != baseline and found and abs(found[max(found)]) >= _LEAST_LOSS
        }
        if differences:
            yield _loss(baseline, losses, differences)


def _divergence(run: str, rows: pandas.DataFrame, first: pandas.Series) -> Finding:
    worst = rows.loc[rows["sqnr_db"].idxmin()]
    lowest = float(worst["sqnr_db"])
    baseline = title_of(str(first["baseline"]))
    return Finding(
        kind="divergence",
        severity=WARNING if lowest < _SEVERE_DB else NOTE,
        title=f"{title_of(run)} parts from {baseline} at {_where(first)}: {float(first['sqnr_db']):.1f} dB",
        text=f"There the error of a result first passes a tenth of the signal ({_PARTED_DB:g} dB).{_samples(rows)} "
        f"The farthest is {_where(worst)}, in the {worst['operation']} pass, with {lowest:.1f} dB.",
        numbers={"sqnr_db": float(first["sqnr_db"]), "lowest_sqnr_db": lowest, "threshold_db": _PARTED_DB},
        place=Place(
            quant_type=run,
            site=str(first["site"]),
            layer=None if first["layer_idx"] != first["layer_idx"] else int(first["layer_idx"]),
        ),
        metric="sqnr_db",
        figure=figure_path("comparisons", "divergence"),
        weight=1 + (_PARTED_DB - lowest) / _PARTED_DB,
    )


def _samples(rows: pandas.DataFrame) -> str:
    """That the data are no reason; nothing where the samples are not known, as of files of another tool."""
    known = "sample_idx" in rows and bool(rows["sample_idx"].notna().all())
    return " The samples are the same." if known else ""


def _where(row: pandas.Series) -> str:
    numbered = row["layer_idx"] == row["layer_idx"] and row["layer_idx"] is not None
    return f"{row['site']}{f' of layer {int(row.layer_idx)}' if numbered else ''}"


def _loss(
    baseline: str, losses: Mapping[str, Mapping[int, float]], differences: Mapping[str, tuple[int, float]]
) -> Finding:
    """Of all runs together; `differences` are their last iteration with the baseline's, and percent."""
    worst = max(differences, key=lambda name: abs(differences[name][1]))
    iteration, percents = differences[worst]
    runs = [
        f"{title_of(name)} {losses[name][last]:.4f} ({'+' if difference > 0 else '-'}{percent(abs(difference))})"
        for name, (last, difference) in sorted(differences.items(), key=lambda item: -abs(item[1][1]))
    ]
    return Finding(
        kind="loss",
        severity=WARNING if abs(percents) >= _SEVERE_LOSS else NOTE,
        title=f"Loss: {title_of(worst)} is {percent(abs(percents))} {'above' if percents > 0 else 'below'} "
        f"{title_of(baseline)}",
        text=f"Against {losses[baseline][iteration]:.4f} of {title_of(baseline)}, in the last iteration both have: "
        f"{listed(runs, len(runs))}. Runs within {_LEAST_LOSS:g} % are left out: that can be the order of summation.",
        numbers={
            "loss": losses[worst][iteration],
            "baseline_loss": losses[baseline][iteration],
            "difference_percent": percents,
        },
        place=Place(quant_type=worst, iteration=iteration),
        figure=figure_path("comparisons", "losses"),
        weight=abs(percents) / _LEAST_LOSS,
    )


def _lost(quant_type: str, iteration: int, loss: float) -> Finding:
    return Finding(
        kind="loss",
        severity=CRITICAL,
        title=f"{title_of(quant_type)}: the loss is {loss} in iteration {iteration}",
        text="The loss of this iteration is no finite number.",
        numbers={"iteration": iteration},
        place=Place(quant_type=quant_type, iteration=iteration),
    )
