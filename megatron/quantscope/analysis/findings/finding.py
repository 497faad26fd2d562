"""One finding, and the order in which a reader should meet many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

KINDS = (
    "nonfinite",
    "rank_disagreement",
    "massive_activation",
    "dead_blocks",
    "saturation",
    "underflow",
    "keep_precision",
    "divergence",
    "loss",
    "outlier_channels",
)
"""Every kind of finding; of equal severity and weight those that stand first come first."""
CRITICAL, WARNING, NOTE = SEVERITIES = ("critical", "warning", "note")
MOST_SHOWN = 12  # of one capture: what does not fit on a screen is not read
_MOST_OF_A_KIND = 3  # notes and warnings; every critical one is said


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where something was found; None: everywhere, or not to be said.

    Attributes:
        quant_type: Of the run.
        site: Such as `fc2.y`.
        layer: From 0.
        rank: Global.
        iteration: As captured.
        micro_batch: In the iteration.
    """

    quant_type: str | None = None
    site: str | None = None
    layer: int | None = None
    rank: int | None = None
    iteration: int | None = None
    micro_batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that stands out.

    Attributes:
        kind: One of `KINDS`.
        severity: One of `SEVERITIES`.
        title: One short line, the numbers that matter in it.
        text: One to three sentences.
        numbers: The numbers of the text, unrounded.
        place: Where to look first.
        metric: What shows it in the report: an id of the page's metrics; None: none does.
        format: The format that it is about; None: it is about the values themselves.
        figure: The PNG that shows it, relative to the output directory; None: none does.
        weight: Orders findings of one severity, 1 for what just passes its threshold, more for worse.
    """

    kind: str
    severity: str
    title: str
    text: str
    numbers: Mapping[str, float | int | str] = field(default_factory=dict)
    place: Place = field(default_factory=Place)
    metric: str | None = None
    format: str | None = None
    figure: str | None = None
    weight: float = 1.0


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """At most `MOST_SHOWN` findings, the most severe first, then by weight, and few of one kind."""
    ordered = sorted(findings, key=_order)
    seen: Counter[str] = Counter()
    kept = []
    for finding in ordered:
        seen[finding.kind] += 1
        if finding.severity == CRITICAL or seen[finding.kind] <= _MOST_OF_A_KIND:
            kept.append(finding)
    return kept[:MOST_SHOWN]


def figure_path(topic: str, name: str, quant_type: str | None = None) -> str:
    """The path of a figure, as `report.figures` names it."""
    suffix = "" if quant_type is None else f"_{quant_type}"
    return f"{topic}/{name}{suffix}.png"


def _order(finding: Finding) -> tuple[int, float, int]:
    return SEVERITIES.index(finding.severity), -finding.weight, KINDS.index(finding.kind)
