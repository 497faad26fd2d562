"""The whole way of drawing: from a capture's analysis to texts, figures and the page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.quantscope.analysis.analyse import AnalysisError, Progress, analyse, told_in_one_line
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.capture.reader import Capture
from megatron.quantscope.report.figures import FIGURES, QUICK, FigureSpec
from megatron.quantscope.report.render import PNG, Rendered, render, tasks_for
from megatron.quantscope.report.text import write_texts

PAGE = "report.html"
_COMPARING = "comparisons"  # the topic whose figures need the comparison of runs; the page comes with all topics


class DrawError(Exception):
    """Drawing can not go on; the message is one line for the user."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What was drawn.

    Attributes:
        open_first: The path to open.
        files: Tensors whose figures are shown.
        bytes: Their bytes.
        reused: How many of them were not read, since their figures were known.
        figures: What became of the figures.
        problems: One line for everything that could not be read.
    """

    open_first: Path
    files: int
    bytes: int
    reused: int
    figures: Rendered
    problems: list[str]


def figures_for(*, quick: bool, only: str | None) -> tuple[FigureSpec, ...]:
    """The figures that a call asks for: all, the quick one, or those of one topic."""
    if quick:
        return (QUICK,)
    return tuple(spec for spec in FIGURES if only in (None, spec.topic))


def draw(
    capture: Capture,
    output: str | os.PathLike[str],
    *,
    workers: int,
    figures: Sequence[FigureSpec],
    progress: Progress,
    suffix: str = PNG,
    formats: Sequence[str] | None = None,
    scheduler: str | None = None,
    selection: str = "",
) -> Drawn:
    """Analyse a capture and draw it; all its figures are drawn with the page.

    Args:
        capture: What `open_capture` gave, or a part of it.
        output: Where tables, texts and figures go; made if it is not there.
        workers: How many processes.
        figures: Which figures.
        progress: Told how far it is.
        suffix: The kind of the figures' files, one of `render.SUFFIXES`.
        formats: Which formats to try; None: all.
        scheduler: The address of a Dask scheduler whose workers read.
        selection: In words, which part of a capture this is.

    Raises:
        DrawError: The output can not be written, no tensor can be read, a worker was killed, or `analyse` says why.
    """
    target = Path(output)
    wanted = {"details": any(spec is not QUICK for spec in figures)}
    wanted["comparison"] = any(spec.topic == _COMPARING for spec in figures)
    try:
        study = analyse(capture, target, workers, progress, formats, scheduler, selection=selection, **wanted)
        del capture  # ten thousand records are 100 MB, which drawing has better use for
        with told_in_one_line(target, workers):
            return draw_study(study, target, workers=workers, figures=figures, progress=progress, suffix=suffix)
    except AnalysisError as error:
        raise DrawError(str(error)) from error


def draw_study(
    study: Study, target: Path, *, workers: int, figures: Sequence[FigureSpec], progress: Progress, suffix: str = PNG
) -> Drawn:
    """Draw what `analyse` gave; the arguments are those of `draw`."""
    write_texts(study, target)
    first = None
    if {spec.name for spec in FIGURES} <= {spec.name for spec in figures}:
        with progress.step("writing the page", None):  # before the figures, which take longer: it can be read meanwhile
            first = _write_page(study, target / PAGE)
    tasks = tasks_for(study, figures, suffix)
    with progress.step("drawing figures", len(tasks)) as advance:
        rendered = render(study, tasks, target, workers, lambda: advance(1))
    if first is None:
        first = target / rendered.written[0] if rendered.written else target
    return Drawn(
        open_first=first,
        files=int(study.summary["file"].notna().sum()),
        bytes=int(study.summary["bytes"].sum()),
        reused=study.scan.reused,
        figures=rendered,
        problems=study.problems,
    )


def _write_page(study: Study, path: Path) -> Path:
    from megatron.quantscope.report.html.build import write_report

    return write_report(study, path)
