"""How figures write and draw runs that are compared: in the colour of their type, told apart by their lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.quantscope.analysis.comparison.runs import type_of_label
from megatron.quantscope.report.style import format_color, format_marker, format_title

if TYPE_CHECKING:
    from matplotlib.lines import Line2D

_LINES = ("-", "--", ":", "-.")  # of the runs of one type, in their order
_MORE_MARKERS = ("*", "d", "P", "X")  # beyond as many runs as there are lines


@dataclass(frozen=True)
class RunStyle:
    """How one run is drawn."""

    title: str
    color: str
    marker: str
    line: str

    @property
    def options(self) -> dict[str, Any]:
        """For `Axes.plot`."""
        return {"color": self.color, "marker": self.marker, "ls": self.line}


def run_styles(labels: Sequence[str]) -> dict[str, RunStyle]:
    """Label -> style; runs of one type differ in their lines, and many of them in their marks."""
    styles: dict[str, RunStyle] = {}
    for label in labels:
        name = type_of_label(label)
        earlier = sum(style.color == format_color(name) for style in styles.values())
        styles[label] = RunStyle(
            run_title(label), format_color(name), format_marker(name), _LINES[earlier % len(_LINES)]
        )
    return styles


def run_title(label: str) -> str:
    """`mxfp8` -> `MXFP8`; `tp2/mxfp8` -> `tp2/MXFP8`."""
    name = type_of_label(label)
    before, found, after = label.rpartition(name)
    return f"{before}{format_title(name)}{after}" if found else label


def run_legend(styles: dict[str, RunStyle]) -> list[Line2D]:
    """Legend handles of runs."""
    from matplotlib.lines import Line2D

    return [Line2D([], [], label=style.title, **style.options) for style in styles.values()]
