"""The texts of a run: tensor_stats.txt for reading, global_statistics.txt and .json for the numbers."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.quantscope import columns
from megatron.quantscope.analysis.aggregate import merged
from megatron.quantscope.analysis.findings import Finding, unseen
from megatron.quantscope.analysis.findings.words import counted, layers
from megatron.quantscope.analysis.global_statistics import global_statistics
from megatron.quantscope.analysis.replaced_files import replaced
from megatron.quantscope.analysis.roles import site_order
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.analysis.trained_as import is_mixed, layers_by_treatment
from megatron.quantscope.report import numbers
from megatron.quantscope.report.page import provenance
from megatron.quantscope.report.style import format_title, shown_format, tried_formats

if TYPE_CHECKING:
    import pandas

_WORST = 15
_STATISTIC_HEADS = (
    "site",
    "tensors",
    "elements",
    "zero",
    "NaN",
    "Inf",
    "min",
    "max",
    "amax",
    "mean",
    "rms",
    "kurtosis",
)
Line = Sequence[str]
_TEXT_WIDTH, _INDENT, _LIMITS_INDENT = 110, " " * 13, " " * 3
_MIXED = "a mixed run: what the operands were quantised to (@2: in the second of their GEMMs alone)"


def write_texts(study: Study, output: Path) -> None:
    """Write tensor_stats.txt and global_statistics/."""
    folder = output / "global_statistics"
    folder.mkdir(parents=True, exist_ok=True)
    statistics = global_statistics(study)
    write_text(folder / "global_statistics.json", json.dumps(statistics, indent=1, allow_nan=False) + "\n")
    write_text(folder / "global_statistics.txt", global_text(statistics, study.findings, unseen(study)))
    write_text(output / "tensor_stats.txt", tensor_text(study))


def write_text(path: Path, text: str) -> None:
    """Write a file that is complete or absent."""
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def tensor_text(study: Study) -> str:
    """Every site of every type in numbers, the worst tensors of each format, and what could not be read."""
    parts = [
        f"Tensors of {study.source}",
        provenance(study, None),
        "",
        findings_text(study.findings, unseen(study)),
        "",
    ]
    for quant_type in study.types:
        frame = study.of_type(quant_type)
        rows = int((study.index["quant_type"] == quant_type).sum())
        parts += [
            f"== {format_title(quant_type)}: {counted(rows, 'tensor')}{_kept(frame)}",
            numbers.facts(frame),
            "",
            *_own_formats(frame, quant_type),
            "-- every site: all layers, micro-batches and ranks together; kurtosis is the worst tensor's",
            aligned(_site_lines(merged(frame, "site"))),
            "",
            "-- SQNR in dB of the GEMM operands under each format",
            aligned(_sqnr_lines(frame[frame["operand"]])),
            "",
            f"-- the {_WORST} operands that lose most under each format",
            aligned(_worst_lines(frame[frame["operand"]])),
            "",
        ]
    parts.append(f"== not read: {len(study.problems)}")
    parts += [f"   {problem}" for problem in study.problems]
    return "\n".join(parts) + "\n"


def _own_formats(frame: pandas.DataFrame, quant_type: str) -> list[str]:
    """What the run did to which operands, where that is not one format for all."""
    if not is_mixed(frame, shown_format(quant_type).name):
        return []
    found = layers_by_treatment(frame)
    alike: dict[tuple[str, str], list[str]] = {}
    for site in sorted(found, key=site_order):
        for treatment, where in found[site].items():
            alike.setdefault((treatment or "as it was", layers(sorted(where))), []).append(site)
    groups = sorted(alike.items(), key=_where)
    lines = [f"{treatment} in {where}: {', '.join(sites)}" for (treatment, where), sites in groups]
    wrapped = [part for line in lines for part in textwrap.wrap(line, _TEXT_WIDTH, subsequent_indent=_LIMITS_INDENT)]
    return [f"-- {_MIXED}", *wrapped, ""]


def _where(group: tuple[tuple[str, str], list[str]]) -> str:
    return group[0][1]


def _kept(frame: pandas.DataFrame) -> str:
    """How the tensors of these rows lie on disk."""
    files = frame["file"].nunique()
    return f" in {counted(files, 'file')}, {numbers.size(frame['bytes'].sum())}" if files else ", statistics alone"


def findings_text(findings: Sequence[Finding], limits: str = "") -> str:
    """What stands out, the most severe first, each with the figure that shows it.

    Args:
        findings: In their order.
        limits: What could not be looked for, in a sentence (`findings.unseen`).
    """
    found = f"{len(findings)}, the most severe first" if findings else "nothing stands out"
    parts = [f"== Findings: {found}{' in what could be looked at' if limits and not findings else ''}"]
    parts += textwrap.wrap(limits, _TEXT_WIDTH, initial_indent=_LIMITS_INDENT, subsequent_indent=_LIMITS_INDENT)
    for place, finding in enumerate(findings, start=1):
        parts.append(f"{place:2}. {finding.severity.upper():8} {finding.title}")
        parts += textwrap.wrap(finding.text, _TEXT_WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
        if finding.figure is not None:
            parts.append(f"{_INDENT}see {finding.figure}")
    return "\n".join(parts)


def global_text(statistics: dict[str, Any], findings: Sequence[Finding] = (), limits: str = "") -> str:
    """The findings, and the totals of global_statistics.json, for reading."""
    parts = [f"Global statistics of {statistics['source']}", "", findings_text(findings, limits), ""]
    for name, of_type in statistics["types"].items():
        total = of_type["total"]
        lines = [
            (key, f"{value:.10g}" if isinstance(value, float) else str(value))
            for key, value in total.items()
            if key != "formats"
        ]
        errors = [("format", "SQNR dB", "underflow", "saturated", "lost")]
        for fmt, error in total["formats"].items():
            sqnr = "exact" if error["exact"] else "lost" if error["lost"] else _decimal(error["sqnr_db"])
            percents = (error[f"{part}_percent"] for part in ("underflow", "saturated", "lost"))
            errors.append((fmt, sqnr, *("-" if value is None else numbers.percent(value) for value in percents)))
        losses = [(f"loss of iteration {key}", f"{value:.6g}") for key, value in of_type["losses"].items()]
        parts += [f"== {name}", aligned([("captured rows", str(of_type["captured_rows"])), *lines, *losses]), ""]
        parts += ["-- all elements under each format", aligned(errors), ""]
    parts.append(f"not read: {len(statistics['problems'])}")
    return "\n".join(parts) + "\n"


def aligned(lines: Sequence[Line]) -> str:
    """Columns of text, the first flush left, the others flush right."""
    return columns.aligned(lines, right=range(1, len(lines[0]) if lines else 1))


def _site_lines(groups: pandas.DataFrame) -> list[Line]:
    lines: list[Line] = [_STATISTIC_HEADS]
    for site in sorted(groups.index, key=site_order):
        row = groups.loc[site]
        counts = (str(int(row["rows"])), numbers.count(row["count"]), numbers.percent(row["zero_percent"]))
        bad = (str(int(row["nan"])), str(int(row["inf"])))
        values = (numbers.magnitude(row[name]) for name in ("min", "max", "amax", "mean", "rms", "kurtosis"))
        lines.append((site, *counts, *bad, *values))
    return lines


def _sqnr_lines(operands: pandas.DataFrame) -> list[Line]:
    formats = tried_formats(operands)
    lines: list[Line] = [("site", *(format_title(name) for name in formats))]
    if operands.empty:
        return lines
    groups = merged(operands, "site")
    for site in sorted(groups.index, key=site_order):
        lines.append((site, *(numbers.decibels(groups.loc[site, f"{name}.sqnr_db"]) for name in formats)))
    return lines


def _worst_lines(operands: pandas.DataFrame) -> list[Line]:
    lines: list[Line] = [("format", "site", "layer", "SQNR dB", "underflow", "saturated", "file")]
    for name in tried_formats(operands):
        worst = operands[operands[f"{name}.sqnr_db"].notna()].nsmallest(_WORST, f"{name}.sqnr_db")
        for _, row in worst.iterrows():
            finite = row["count"] - row["nan"] - row["inf"]
            underflow = numbers.percent(100 * row[f"{name}.underflow"] / max(1, finite - row["zero"]))
            saturated = numbers.percent(100 * row[f"{name}.saturated"] / max(1, finite))
            layer = "-" if row["layer_idx"] != row["layer_idx"] else str(int(row["layer_idx"]))
            sqnr = numbers.decibels(row[f"{name}.sqnr_db"])
            lines.append((name, row["site"], layer, sqnr, underflow, saturated, Path(row["file"]).name))
    return lines


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
