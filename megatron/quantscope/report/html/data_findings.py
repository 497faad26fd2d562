"""The findings, each with a link to the place in the page that shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from megatron.quantscope.report.html.data_cells import OUTSIDE, Cells
from megatron.quantscope.report.html.encode import number

if TYPE_CHECKING:
    from megatron.quantscope.analysis.findings import Finding
    from megatron.quantscope.analysis.study import Study

Part = dict[str, Any]

OF_RUNS, OF_LOSSES = "divergence", "loss"
OVERVIEW = "#/"


def findings(study: Study, cells: Cells) -> list[Part]:
    """The contract's `findings`, in their order."""
    return [_part(finding, cells) for finding in study.findings]


def link_of(finding: Finding, cells: Cells) -> str:
    """The hash of the view that shows a finding: the comparison, the tensor that it names, or a heatmap.

    What the page has not, because ranks or iterations were put together, is left out of it.
    """
    place = finding.place
    told = {"iteration": place.iteration, "rank": place.rank}
    within = {name: value for name, value in told.items() if value is not None and value in cells.axes[f"{name}s"]}
    tensor = (place.quant_type or cells.types[0], place.site, OUTSIDE if place.layer is None else place.layer)
    if finding.kind == OF_LOSSES:
        return OVERVIEW
    if finding.kind == OF_RUNS:
        return _hash("compare", {"run": place.quant_type})
    if tensor in cells.places:
        path = "/".join(quote(str(part), safe="") for part in tensor)
        return _hash(f"tensor/{path}", within | {"format": finding.format})
    shown = {"metric": finding.metric, "format": finding.format, "type": place.quant_type}
    return _hash("heatmap", shown | within) if finding.metric else OVERVIEW


def _hash(view: str, parameters: Mapping[str, Any]) -> str:
    named = {name: value for name, value in parameters.items() if value is not None}
    given = urlencode(named, quote_via=quote, safe="")
    return f"#/{view}{'?' if given else ''}{given}"


def _part(finding: Finding, cells: Cells) -> Part:
    told = finding.numbers.items()
    return {
        "severity": finding.severity,
        "kind": finding.kind,
        "title": finding.title,
        "text": finding.text,
        "numbers": {name: value if isinstance(value, str) else number(value) for name, value in told},
        "type": finding.place.quant_type,
        "site": finding.place.site,
        "layer": finding.place.layer,
        "rank": finding.place.rank,
        "iteration": finding.place.iteration,
        "metric": finding.metric,
        "format": finding.format,
        "figure": finding.figure,
        "link": link_of(finding, cells),
    }
