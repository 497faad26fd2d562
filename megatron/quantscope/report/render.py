"""Draw figures in a pool of workers, all from one study, as PNG files that are complete or absent."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.analysis.study import Study
from megatron.quantscope.analysis.workers import worker_pool
from megatron.quantscope.report.figures import FigureSpec
from megatron.quantscope.report.style import house_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """One file to draw; `quant_type` is None for a figure of the whole capture."""

    spec: FigureSpec
    quant_type: str | None

    @property
    def path(self) -> Path:
        """Of the file, relative to the output directory."""
        suffix = f"_{self.quant_type}" if self.quant_type is not None else ""
        return Path(self.spec.topic) / f"{self.spec.name}{suffix}.png"


@dataclass
class Rendered:
    """What became of the figures.

    Attributes:
        written: Paths relative to the output directory.
        left_out: Relative path -> why the capture has no such figure.
        failed: Relative path -> error; a fault of this program, not of the capture.
    """

    written: list[Path] = field(default_factory=list)
    left_out: dict[Path, str] = field(default_factory=dict)
    failed: dict[Path, str] = field(default_factory=dict)


def tasks_for(study: Study, specs: Sequence[FigureSpec]) -> list[Task]:
    """One task a figure, for those of each type one a type."""
    return [Task(spec, quant_type) for spec in specs for quant_type in (study.types if spec.per_type else (None,))]


def render(
    study: Study, tasks: Sequence[Task], output: Path, workers: int, advance: Callable[[], None] = lambda: None
) -> Rendered:
    """Draw every task.

    Args:
        study: What to draw.
        tasks: What figures.
        output: Where; topics become directories in it.
        workers: How many processes.
        advance: Called after each figure.
    """
    result = Rendered()
    for topic in {task.path.parent for task in tasks}:
        (output / topic).mkdir(parents=True, exist_ok=True)
    with worker_pool(min(workers, len(tasks)), initializer=_keep, arguments=(study, output)) as pool:
        for task, outcome in zip(tasks, pool.map(_draw, tasks), strict=True):
            _note(result, task, outcome)
            advance()
    return result


@dataclass(frozen=True)
class _Outcome:
    written: bool
    error: str | None = None


_kept: dict[str, tuple[Study, Path]] = {}  # of a worker


def _keep(study: Study, output: Path) -> None:
    _kept["study"] = (study, output)


def _draw(task: Task) -> _Outcome:
    study, output = _kept["study"]
    try:
        with house_style():
            arguments = () if task.quant_type is None else (task.quant_type,)
            figure = task.spec.drawing()(study, *arguments)
            if figure is None:
                return _Outcome(written=False)
            _save(figure, output / task.path)
    except OSError:
        raise
    except Exception as error:  # one figure must not take the others with it: it is reported, and the exit code says so
        logger.debug("%s", task.path, exc_info=True)
        return _Outcome(written=False, error=f"{type(error).__name__}: {error}")
    return _Outcome(written=True)


def _save(figure: Figure, target: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    layout = figure.get_layout_engine()
    if layout is not None:  # laid out once here: savefig would draw everything twice for it
        layout.execute(figure)
        figure.set_layout_engine("none")
    temporary = target.with_name(f".{target.name}.writing-{os.getpid()}")
    try:
        figure.savefig(temporary, format="png", metadata={"Software": "megatron.quantscope"})
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _note(result: Rendered, task: Task, outcome: _Outcome) -> None:
    if outcome.written:
        result.written.append(task.path)
    elif outcome.error is None:
        result.left_out[task.path] = task.spec.absent
        logger.info("%s is left out: %s", task.path, task.spec.absent)
    else:
        result.failed[task.path] = outcome.error
        logger.error("%s could not be drawn: %s", task.path, outcome.error)
