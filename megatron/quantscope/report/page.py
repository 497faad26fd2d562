"""The sheet that a figure is drawn on: a title that says what, where and when, the facts, a footer of provenance."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron.quantscope.analysis.study import Study
from megatron.quantscope.report import numbers
from megatron.quantscope.report.style import (
    FAINT,
    FAMILY_COLORS,
    INK,
    MUTED,
    SPAN_COLORS,
    format_color,
    format_marker,
    format_title,
)

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_MARGIN = 0.14  # inches, as all of these
_TITLE_LINE, _NOTE_LINE, _LEGEND, _FOOTER = 0.26, 0.165, 0.22, 0.24
_NOTE_CHARACTERS, _FOOTER_CHARACTERS = 15.5, 19.0  # an inch
_VERSIONS = ("torch", "megatron_core", "megatron-core", "quantscope")


def new_page(
    width: float,
    height: float,
    *,
    title: str,
    note: str,
    study: Study,
    quant_type: str | None = None,
    frame: pandas.DataFrame | None = None,
    legend: Sequence[Any] = (),
) -> Figure:
    """An empty figure with its head and foot; what is added to it is laid out between them.

    Args:
        width: Inches.
        height: Inches of what lies between head and foot.
        title: What is shown, where in the model; the run is added to it.
        note: How to read it; wrapped to the width.
        study: Where the data comes from.
        quant_type: The run that is shown; None: all of the capture.
        frame: The rows that are shown, whose facts follow the note.
        legend: Handles of one legend for all panels.
    """
    from matplotlib.figure import Figure

    if quant_type is not None:
        title = f"{title}, {format_title(quant_type)} run"
    lines = textwrap.wrap(note, int(width * _NOTE_CHARACTERS))
    if frame is not None:
        lines.append(numbers.facts(frame))
    head = _MARGIN + _TITLE_LINE + len(lines) * _NOTE_LINE
    left, total = _MARGIN / width, height + head + _FOOTER + (_LEGEND if legend else 0)
    page = Figure(figsize=(width, total))
    _write_texts(page, title, lines, provenance(study, quant_type))
    if legend:
        anchor = (left, 1 - (head + 0.04) / total)
        page.legend(handles=list(legend), ncols=len(legend), loc="upper left", bbox_to_anchor=anchor, borderaxespad=0)
    body = (left, _FOOTER / total, 1 - 2 * left, height / total)
    page.set_layout_engine("constrained", rect=body, h_pad=0.06, w_pad=0.06)
    return page


def _write_texts(page: Figure, title: str, lines: Sequence[str], foot: str) -> None:
    width, height = page.get_size_inches()
    left = _MARGIN / width
    page.text(left, 1 - _MARGIN / height, title, fontsize=11, fontweight="bold", color=INK, va="top")
    below = 1 - (_MARGIN + _TITLE_LINE) / height
    page.text(left, below, "\n".join(lines), fontsize=7.5, color=MUTED, va="top", linespacing=1.35)
    foot = textwrap.shorten(foot, int(width * _FOOTER_CHARACTERS), placeholder=" ...")
    page.text(left, _MARGIN / 2 / height, foot, fontsize=6, color=MUTED, va="bottom")


def format_legend(names: Sequence[str]) -> list[Any]:
    """Legend handles of formats, as lines with their marks."""
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color=format_color(name), marker=format_marker(name), label=format_title(name)) for name in names
    ]


def family_legend(families: Sequence[str]) -> list[Any]:
    """Legend handles of families of tensors, as dots."""
    from matplotlib.lines import Line2D

    return [Line2D([], [], ls="", marker="o", color=FAMILY_COLORS[name], label=f"{name}s") for name in families]


def span_legend() -> list[Any]:
    """Legend handles of the shaded ranges of a format."""
    from matplotlib.patches import Patch

    return [Patch(facecolor=color, edgecolor=FAINT, label=name) for name, color in SPAN_COLORS.items()]


def provenance(study: Study, quant_type: str | None) -> str:
    """Which run, made by which versions, read from where."""
    types = [quant_type] if quant_type is not None else study.types
    parts = []
    for name in types:
        info = study.run_info.get(name, {})
        parts.append(f"run {info['run_id']}" if "run_id" in info else f"{name}: files without a run record")
    versions = study.run_info.get(types[0], {}).get("versions", {}) if types else {}
    if isinstance(versions, dict):
        parts += [f"{name.replace('_', '-')} {versions[name]}" for name in _VERSIONS if name in versions]
    parts.append(f"read from {study.source}")
    return " · ".join(dict.fromkeys(parts))
