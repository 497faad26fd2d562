"""The runs that are compared, and what each is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.quantscope.analysis.study import ordered_types
from megatron.quantscope.capture.reader import Capture
from megatron.quantscope.capture.record import TensorRecord


@dataclass(frozen=True, kw_only=True)
class Run:
    """One quant type of a capture.

    Attributes:
        label: What tables and figures call it; no two runs of a comparison have the same.
        capture: Where its tensors are.
        quant_type: Which type of the capture.
    """

    label: str
    capture: Capture
    quant_type: str

    @property
    def records(self) -> list[TensorRecord]:
        """Its records, by rank and order of saving."""
        return [record for record in self.capture.records if record.quant_type == self.quant_type]

    @property
    def commits(self) -> dict[int, dict[str, float]]:
        """Iteration -> scalars of its completed iterations."""
        return self.capture.commits.get(self.quant_type, {})


def runs_of(captures: Sequence[Capture]) -> list[Run]:
    """Every quant type of every capture; the plainest type of the first capture is first, and so the baseline.

    A label is the quant type where only one capture has it, else `directory/type`; where that is not unique either, it
    has as much of the path, or the run's id, as tells the runs apart.
    """
    of_all = [(capture, name) for capture in captures for name in ordered_types(capture.quant_types)]
    labels = [""] * len(of_all)
    unnamed = list(range(len(of_all)))
    for form in _FORMS:
        names = {place: form(*of_all[place]) for place in unnamed}
        seen = Counter(names.values())
        for place, name in names.items():
            labels[place] = name
        unnamed = [place for place, name in names.items() if seen[name] > 1]
    for number, place in enumerate(unnamed, start=1):  # one capture, opened twice
        labels[place] += f" ({number})"
    return [
        Run(label=label, capture=capture, quant_type=name)
        for label, (capture, name) in zip(labels, of_all, strict=True)
    ]


def type_of_label(label: str) -> str:
    """The quant type of a run that `runs_of` named."""
    return label.rsplit("/", 1)[-1].split(_RUN_MARK)[0].split(" ")[0]


def _by_directory(capture: Capture, quant_type: str) -> str:
    """`directory/type`; of a directory that is a type folder itself, the name of the one above it."""
    folder = capture.directory.absolute()
    return f"{folder.parent.name if folder.name == quant_type else folder.name}/{quant_type}"


def _by_path(capture: Capture, quant_type: str) -> str:
    return f"{capture.directory}/{quant_type}"


def _by_run(capture: Capture, quant_type: str) -> str:
    run_id = capture.run_info.get(quant_type, {}).get("run_id", "")
    return f"{_by_directory(capture, quant_type)}{_RUN_MARK}{run_id}"


_RUN_MARK = "@"
_FORMS: tuple[Callable[[Capture, str], str], ...] = (
    lambda capture, quant_type: quant_type,
    _by_directory,
    _by_path,
    _by_run,
)
