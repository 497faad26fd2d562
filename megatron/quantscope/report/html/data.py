"""The one JSON object of the page, put together from its parts."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron.quantscope.analysis.distribution import NORMAL_SCORES
from megatron.quantscope.analysis.roles import site_order
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.report.html.data_cells import Cells, cell_columns, cells_of
from megatron.quantscope.report.html.data_comparison import comparison
from megatron.quantscope.report.html.data_details import details_of
from megatron.quantscope.report.html.data_findings import findings
from megatron.quantscope.report.html.data_formats import METRICS, format_of, formats
from megatron.quantscope.report.html.data_images import attention, block_maps, surfaces
from megatron.quantscope.report.html.data_runs import losses, runs

SCHEMA = 1
Part = dict[str, Any]

_SECONDS_FOR_GIT = 5
_IDENTITY = {"type": "run", "site": "site", "layer": "layer", "iteration": "iteration", "rank": "rank"}
_WORDS = {"rank": "ranks", "iteration": "iterations"}


def page_data(study: Study) -> Part:
    """Everything that the page shows of a study."""
    cells = cells_of(study)
    columns = cell_columns(cells)
    return {
        "schema": SCHEMA,
        "title": f"Quantscope: {Path(study.source).name or study.source}",
        "source": study.source,
        "selection": study.selection or None,
        "generated": datetime.now().astimezone().isoformat(timespec="seconds"),
        "quantscope": version(),
        "command": [str(word) for word in sys.argv],
        "runs": runs(study),
        "baseline": study.types[0],
        "losses": losses(study),
        "findings": findings(study, cells),
        "problems": study.problems,
        "formats": formats(_tried(columns)),
        "metrics": _metrics(columns),
        "axes": _axes(cells),
        "merged": _merged(cells),
        "normal_scores": list(NORMAL_SCORES),
        "cells": columns,
        "details": details_of(cells),
        "surfaces": surfaces(study, cells),
        "block_maps": block_maps(study, cells),
        "attention": attention(study),
        "comparison": comparison(study),
        "table": _table(columns),
    }


def version() -> str:
    """The commit of this checkout; empty where it is none."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS_FOR_GIT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _tried(columns: Part) -> set[str]:
    """The names of the formats that a column is of."""
    return {format_of(key.partition("/")[2]).name for key in columns["values"] if "/" in key}


def _metrics(columns: Part) -> list[Part]:
    kept = {key.partition("/")[0] for key in columns["values"]}
    return [metric.part for metric in METRICS if metric.id in kept]


def _axes(cells: Cells) -> Part:
    rows = cells.rows.drop_duplicates("site").set_index("site")
    sites = sorted(rows.index, key=site_order)
    gemms = rows["gemms"].dropna().to_dict() if "gemms" in rows else {}
    return {
        **cells.axes,
        "families": {site: str(rows.loc[site, "family"]) for site in sites},
        "gemms": {site: [str(gemm) for gemm in gemms.get(site, ())] for site in sites},
        "operands": [site for site in sites if rows.loc[site, "operand"]],
    }


def _merged(cells: Cells) -> str | None:
    """Says what was put together, so that nobody takes a sum for one rank's."""
    if not cells.merged:
        return None
    what = " and ".join(_WORDS[name] for name in cells.merged)
    return f"All {what} are put together to keep this file small: counts and sums of squares are added, ratios follow."


def _table(columns: Part) -> Part:
    """The columns of the table: where a tensor is, then every metric."""
    kinds = {"type": "text", "site": "text"}
    places = [{"id": name, "title": title, "kind": kinds.get(name, "int")} for name, title in _IDENTITY.items()]
    metrics = [
        {"id": metric["id"], "title": metric["title"], "kind": "percent" if metric["scale"] == "percent" else "float"}
        for metric in _metrics(columns)
    ]
    return {"columns": places + metrics, "from": "cells"}
