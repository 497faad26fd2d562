"""Draw figures in a pool of workers, all from one study, as files that are complete or absent.

The same study gives the same bytes: no file holds a date, and the names inside an SVG follow from its content.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.analysis.errors import AnalysisError
from megatron.quantscope.analysis.replaced_files import replaced
from megatron.quantscope.analysis.study import Study
from megatron.quantscope.analysis.workers import worker_pool
from megatron.quantscope.report.figures import FigureSpec
from megatron.quantscope.report.style import house_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

PNG = "png"
_PROGRAM = "megatron.quantscope"
_METADATA: Mapping[str, Mapping[str, str | None]] = {
    PNG: {"Software": _PROGRAM},
    "svg": {"Creator": _PROGRAM, "Date": None},
    "pdf": {"Creator": _PROGRAM, "CreationDate": None},
}
SUFFIXES = tuple(_METADATA)
_PLACES = 6  # of positions in a figure, which is then right to a thousandth of a pixel


@dataclass(frozen=True)
class Task:
    """One file to draw; `quant_type` is None for a figure of the whole capture, `suffix` is one of `SUFFIXES`."""

    spec: FigureSpec
    quant_type: str | None
    suffix: str = PNG

    @property
    def path(self) -> Path:
        """Of the file, relative to the output directory."""
        of_type = f"_{self.quant_type}" if self.quant_type is not None else ""
        return Path(self.spec.topic) / f"{self.spec.name}{of_type}.{self.suffix}"


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


def tasks_for(study: Study, specs: Sequence[FigureSpec], suffix: str = PNG) -> list[Task]:
    """One task a figure, for those of each type one a type."""
    of_types: tuple[str | None, ...] = tuple(study.types)
    return [Task(spec, name, suffix) for spec in specs for name in (of_types if spec.per_type else (None,))]


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
            with _warnings_logged(task.path):
                _save(figure, output / task.path, task.suffix)
    except (OSError, AnalysisError):
        raise
    except Exception as error:  # one figure must not take the others with it: it is reported, and the exit code says so
        logger.debug("%s", task.path, exc_info=True)
        return _Outcome(written=False, error=f"{type(error).__name__}: {error}")
    return _Outcome(written=True)


@contextmanager
def _warnings_logged(path: Path) -> Iterator[None]:
    """What matplotlib says of a layout or a font goes to the log, for --verbose: the figure is there all the same."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    for line in dict.fromkeys(str(warning.message) for warning in found):
        logger.info("%s: %s", path, line.partition("\n")[0])


def _save(figure: Figure, target: Path, suffix: str) -> None:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    layout = figure.get_layout_engine()
    if layout is not None:  # laid out once here: savefig would draw everything twice for it
        layout.execute(figure)
        figure.set_layout_engine("none")
        for axes in figure.axes:  # the solver's last digits are not the same each time, and an SVG's names hold them
            bounds = [round(float(edge), _PLACES) for edge in axes.get_position(original=True).bounds]
            axes.set_position((bounds[0], bounds[1], bounds[2], bounds[3]), which="original")
    with replaced(target) as temporary, rc_context({"svg.hashsalt": _PROGRAM}):
        figure.savefig(temporary, format=suffix, metadata=dict(_METADATA[suffix]))


def _note(result: Rendered, task: Task, outcome: _Outcome) -> None:
    if outcome.written:
        result.written.append(task.path)
    elif outcome.error is None:
        result.left_out[task.path] = task.spec.absent
        logger.info("%s is left out: %s", task.path, task.spec.absent)
    else:
        result.failed[task.path] = outcome.error
        logger.error("%s could not be drawn: %s", task.path, outcome.error)
