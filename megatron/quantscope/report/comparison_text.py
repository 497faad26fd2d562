"""The comparison of runs as files: comparison.parquet for the numbers, comparison.txt for reading."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.analysis.comparison.growth import Growth, growths, steps
from megatron.quantscope.analysis.comparison.parting import by_run, partings, worst
from megatron.quantscope.analysis.comparison.runs import Run
from megatron.quantscope.analysis.comparison.table import ComparisonLog
from megatron.quantscope.analysis.kept_comparison import keep_comparison
from megatron.quantscope.analysis.losses import loss_differences, losses_of_runs
from megatron.quantscope.capture.metadata import BACKWARD, FORWARD
from megatron.quantscope.report import numbers
from megatron.quantscope.report.text import Line, aligned, write_text

if TYPE_CHECKING:
    import pandas

TEXT = "comparison.txt"
_WORST = 20
_PLACE = {
    "iteration": "iteration",
    "micro_batch": "micro-batch",
    "rank": "rank",
}  # column -> head, where there are several


def write_comparison(
    table: pandas.DataFrame, target: Path, *, log: ComparisonLog | None = None, runs: Sequence[Run] = ()
) -> Path:
    """Write comparison.parquet and comparison.txt; each is complete or absent.

    Args:
        table: What `compare` gave.
        target: The directory.
        log: Names what has no partner and what could not be read.
        runs: Whose losses to set side by side.

    Returns:
        The path of the text.
    """
    target.mkdir(parents=True, exist_ok=True)
    keep_comparison(target, table, digest=None)
    write_text(target / TEXT, comparison_text(table, log=log, runs=runs))
    return target / TEXT


def comparison_text(table: pandas.DataFrame, *, log: ComparisonLog | None = None, runs: Sequence[Run] = ()) -> str:
    """Where the runs part, how the distance grows, and the worst tensors of each."""
    parts = [_head(table), ""]
    parts += [*_losses(runs), *_layers(growths(table))]
    for name, rows in by_run(table):
        parts += _of_run(name, rows)
    for title, lines in (("without a partner", log.notes), ("not compared", log.problems)) if log else ():
        parts += [f"== {title}: {len(lines) or 'nothing'}", *(f"   {line}" for line in lines)]
    return "\n".join(parts) + "\n"


def _head(table: pandas.DataFrame) -> str:
    if table.empty:
        return "Comparison: no tensor of one run has a partner in another"
    baseline, runs = table["baseline"].iloc[0], list(table["run"].unique())
    return f"Comparison of {', '.join(runs)} with {baseline}: {len(table)} pairs of tensors"


def _losses(runs: Sequence[Run]) -> list[str]:
    losses = losses_of_runs(runs)
    if not losses or not runs:
        return []
    differences = loss_differences(losses, runs[0].label)
    iterations = sorted({iteration for of_run in losses.values() for iteration in of_run})
    lines: list[Line] = [("iteration", *(cell for name in losses for cell in (name, "difference")))]
    for iteration in iterations:
        cells = []
        for name, of_run in losses.items():
            difference = differences[name].get(iteration)
            cells.append(f"{of_run[iteration]:.5f}" if iteration in of_run else "-")
            cells.append("-" if difference is None else f"{difference:+.3f} %")
        lines.append((str(iteration), *cells))
    return [f"-- lm loss, and its difference to that of {runs[0].label}", aligned(lines), ""]


def _of_run(name: str, rows: pandas.DataFrame) -> list[str]:
    equal = int(rows["equal"].sum())
    parts = [f"== {name} against {rows['baseline'].iloc[0]}: {len(rows)} tensors, {equal} of them equal bit by bit", ""]
    parts += [parting.text for parting in partings(rows)]
    if equal < len(rows):
        parts += [growth.text for growth in growths(rows)] + [step.text for step in steps(rows)]
        parts += ["", "-- every site", aligned(_site_lines(rows))]
        parts += ["", f"-- the {_WORST} worst tensors", aligned(_worst_lines(rows))]
    return [*parts, ""]


def _site_lines(rows: pandas.DataFrame) -> list[Line]:
    """Sites in the order in which they are first executed."""
    lines: list[Line] = [
        ("site", "tensors", "equal", "median SQNR dB", "lowest SQNR dB", "lowest cosine", "relative L2", "max error")
    ]
    for site, of_site in sorted(rows.groupby("site"), key=lambda group: group[1]["order"].min()):
        lines.append(
            (
                str(site),
                str(len(of_site)),
                str(int(of_site["equal"].sum())),
                numbers.decibels(of_site["sqnr_db"].median()),
                numbers.decibels(of_site["sqnr_db"].min()),
                _cosine(of_site["cosine"].min()),
                numbers.magnitude(of_site["relative_l2"].max()),
                numbers.magnitude(of_site["max_error"].max()),
            )
        )
    return lines


def _worst_lines(rows: pandas.DataFrame) -> list[Line]:
    told = [column for column in _PLACE if rows[column].nunique() > 1]
    heads = ("site", "layer", "pass", *(_PLACE[column] for column in told))
    lines: list[Line] = [(*heads, "SQNR dB", "cosine", "relative L2", "max error")]
    for _, row in worst(rows, _WORST).iterrows():
        place = (row["site"], _whole(row["layer_idx"]), row["operation"], *(_whole(row[column]) for column in told))
        sizes = (numbers.magnitude(row["relative_l2"]), numbers.magnitude(row["max_error"]))
        lines.append((*place, numbers.decibels(row["sqnr_db"]), _cosine(row["cosine"]), *sizes))
    return lines


def _layers(found: Sequence[Growth]) -> list[str]:
    """The medians of all runs, a line a layer."""
    if not found:
        return []
    runs = list(dict.fromkeys(growth.run for growth in found))
    of = {(growth.run, growth.operation): dict(zip(growth.layers, growth.sqnr_db, strict=True)) for growth in found}
    columns = [(run, operation) for operation in (FORWARD, BACKWARD) for run in runs if (run, operation) in of]
    lines: list[Line] = [("layer", *(f"{run} {operation}" for run, operation in columns))]
    for layer in sorted({layer for values in of.values() for layer in values}):
        cells = (of[column].get(layer, float("nan")) for column in columns)
        lines.append((str(layer), *(numbers.decibels(value) for value in cells)))
    return ["-- median SQNR of every layer in dB, weights left out", aligned(lines), ""]


def _whole(value: float) -> str:
    return "-" if value is None or value != value else str(int(value))


def _cosine(value: float) -> str:
    return "-" if value != value else f"{value:.6f}"
