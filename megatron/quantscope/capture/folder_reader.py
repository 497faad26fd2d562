"""Reading back one folder of captured files: the rows of one run, and the files that no manifest lists.

A row is left out when its file, or its place in a segment, is not there any more; sizes tell, no tensor is read. A
`pt` file that no run lists stands for itself: a user's own `save_tensor`, another tool's, or the last file of a killed
run. It belongs to the run that its metadata names; one that names none belongs to every reading.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.files import TEMPORARY_PREFIX
from megatron.quantscope.capture.folder import RUNS_FOLDER
from megatron.quantscope.capture.names import SUFFIX, parse_name
from megatron.quantscope.capture.record import PT, SEGMENT, TensorRecord
from megatron.quantscope.capture.run_folder import Manifest, RunFolder, run_folders
from megatron.quantscope.capture.tensor_file import damage, load_file

_EXAMPLES = 3  # names that a summarising message gives
_UNFINISHED = "unfinished files of a run that was killed or still goes on"


@dataclass
class FolderContent:
    """What one folder holds.

    Attributes:
        records: Of the chosen run, and bare files.
        problems: One line each, without the folder's name.
        commits: Iteration -> scalars.
        run: The chosen run; None in a folder without runs.
        run_info: Its `run.json`.
        run_ids: All runs, the oldest first.
    """

    records: list[TensorRecord] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    commits: dict[int, dict[str, float]] = field(default_factory=dict)
    run: str | None = None
    run_info: dict[str, Any] = field(default_factory=dict)
    run_ids: list[str] = field(default_factory=list)

    def quant_type(self, folder: Path) -> str:
        """The type of what `folder` holds, as its run says, else as it is called."""
        return str(self.run_info.get("quant_type") or folder.name)


@dataclass(frozen=True)
class FolderFiles:
    """The files of a type folder itself.

    Attributes:
        sizes: Name of a `.pt` file -> its bytes.
        unfinished: Names of files that were begun and not completed.
        foreign: Names of all others.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)


def holds_captures(folder: Path) -> bool:
    """Whether `folder` itself, not one below it, holds captured files or the records of runs."""
    with os.scandir(folder) as entries:
        return any(entry.name == RUNS_FOLDER or entry.name.endswith(SUFFIX) for entry in entries)


def list_folder(folder: Path) -> FolderFiles:
    """What lies in a type folder beside its runs."""
    files = FolderFiles()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(TEMPORARY_PREFIX):
                files.unfinished.append(entry.name)
            elif entry.is_file() and entry.name.endswith(SUFFIX):
                files.sizes[entry.name] = entry.stat().st_size
            elif entry.is_file():
                files.foreign.append(entry.name)
    return files


def read_folder(folder: Path, run: str | None) -> FolderContent:
    """Everything in `folder` that belongs to `run`; None: to the latest run that kept anything."""
    content = FolderContent()
    runs = run_folders(folder)
    content.run_ids = [candidate.run_id for candidate in runs]
    chosen, manifests = _choose(runs, run, content)
    files = list_folder(folder)  # after the manifests, which may still grow: a file is there before its line
    _tell_of_others(files, content)
    if chosen is not None:
        content.run, content.run_info = chosen.run_id, chosen.info()
        _add_run(_RunReader(folder, chosen, files.sizes, content), manifests)
    if run is None or chosen is not None:
        listed = {name for manifest in manifests for name in manifest.tensor_files}
        for other in runs:
            if other != chosen:
                listed |= other.tensor_files()
        _add_bare_files(folder, {name: size for name, size in files.sizes.items() if name not in listed}, run, content)
    content.records.sort(key=lambda record: (record.rank or 0, record.counter))
    return content


def _tell_of_others(files: FolderFiles, content: FolderContent) -> None:
    foreign = [name for name in files.foreign if not name.startswith(".")]
    if files.unfinished:
        content.problems.append(f"{len(files.unfinished)} {_UNFINISHED}")
    if foreign:
        content.problems.append(f"{_names(foreign)}: not captured, left out")


def _choose(runs: list[RunFolder], run: str | None, content: FolderContent) -> tuple[RunFolder | None, list[Manifest]]:
    """The run to read and its manifests."""
    for candidate in reversed(runs):
        if run is not None and candidate.run_id != run:
            continue
        manifests = candidate.manifests()
        if run is not None or any(manifest.rows for manifest in manifests):
            return candidate, manifests
        reasons = [problem for manifest in manifests for problem in manifest.problems]
        if candidate.files.unfinished:
            reasons.append(f"{len(candidate.files.unfinished)} {_UNFINISHED}")
        content.problems.append("; ".join([f"run {candidate.run_id} kept nothing", *reasons]))
    return None, []


@dataclass
class _RunReader:
    """The rows of one run on their way to records.

    Attributes:
        lost: Name of a segment -> how many tensors and how many block maps are gone with what it lacks.
        told: Problems of `pt` files that were told: a file and the rows that refer to it, once.
    """

    folder: Path
    run: RunFolder
    sizes: Mapping[str, int]
    content: FolderContent
    lost: dict[str, list[int]] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)

    def add(self, row: Mapping[str, Any], *, committed: bool) -> None:
        """Make the row a record, or a problem."""
        problem = None
        if row["store"] == PT:
            problem = _size_problem(row["file"], self.sizes.get(row["file"]), row["bytes"])
        elif row["store"] == SEGMENT and self._is_lost(row["file"], row["offset"] + row["bytes"], map_=False):
            return
        if problem is None:
            blocks = row["blocks"]
            if blocks and self._is_lost(blocks["file"], blocks["offset"] + math.prod(blocks["shape"]), map_=True):
                row = {**row, "blocks": None}
            try:
                record = TensorRecord.from_row(row, self.folder, self.run.path, committed=committed)
                self.content.records.append(record)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                problem = f"{row['file']}: its manifest row can not be read: {error!r}"
        if problem is not None and problem not in self.told:
            self.told.add(problem)
            self.content.problems.append(problem)

    def _is_lost(self, file: str, end: int, *, map_: bool) -> bool:
        if end <= self.run.files.segments.get(file, -1):
            return False
        self.lost.setdefault(file, [0, 0])[map_] += 1
        return True


def _add_run(reader: _RunReader, manifests: list[Manifest]) -> None:
    content, files = reader.content, reader.run.files
    place = f"{RUNS_FOLDER}/{reader.run.run_id}"
    for manifest in manifests:
        content.problems += manifest.problems
        for iteration, commit in manifest.commits.items():
            content.commits.setdefault(iteration, commit["scalars"])  # the lowest rank's: they agree
        for iteration, count in manifest.uncommitted.items():
            content.problems.append(
                f"iteration {iteration} of rank {manifest.rank} was not completed: {count} tensors of it are there"
            )
        for row in manifest.rows:
            reader.add(row, committed=row["iteration"] in manifest.commits)
    if files.unfinished:
        content.problems.append(f"{place}: {len(files.unfinished)} {_UNFINISHED}")
    expected = {name: entry["bytes"] for manifest in manifests for name, entry in manifest.segments.items()}
    for name in sorted(reader.lost.keys() | expected.keys()):
        lost = reader.lost.get(name)
        problem = _segment_problem(f"{place}/{name}", files.segments.get(name), expected.get(name), lost)
        if problem:
            content.problems.append(problem + _losses(*(lost or (0, 0))))
    named = {name for manifest in manifests for name in manifest.segment_files}
    for name in sorted(files.segments.keys() - named):
        content.problems.append(f"{place}/{name}: no manifest lists it, left out")


def _size_problem(name: str, size: int | None, expected: int) -> str | None:
    if size is None:
        return f"{name}: missing"
    if size != expected:
        return f"{name}: damaged, {size} bytes instead of {expected}"
    return None


def _segment_problem(name: str, size: int | None, expected: int | None, lost: list[int] | None) -> str | None:
    """The same of a segment, whose size is known when it was completed; `lost` says that it lacks something."""
    if size is None or expected is not None:
        problem = _size_problem(name, size, expected or 0)
        if problem:
            return problem
    return f"{name}: damaged, {size} bytes are too few" if lost else None


def _losses(rows: int, maps: int) -> str:
    """How many rows and maps went with a part of a segment."""
    lost = [f"the tensors of {rows} rows"] * bool(rows) + [f"the block maps of {maps} rows"] * bool(maps)
    return f", and with it {' and '.join(lost)}" if lost else ""


def _add_bare_files(folder: Path, sizes: dict[str, int], run: str | None, content: FolderContent) -> None:
    foreign = []
    for filename, size in sorted(sizes.items()):
        path = folder / filename
        name = parse_name(filename)
        wrong = damage(path)
        if name is None:
            foreign.append(filename)
        elif wrong:
            content.problems.append(f"{filename}: {wrong}")
        elif not content.run_ids:
            content.records.append(TensorRecord.from_name(name, path, size))
        else:
            _add_of_run(TensorRecord.from_name(name, path, size), path, run, content)
    if foreign:
        content.problems.append(f"{_names(foreign)}: no name that a captured file has, left out")


def _add_of_run(record: TensorRecord, path: Path, run: str | None, content: FolderContent) -> None:
    """Take a bare file of a folder with runs when its own metadata does not place it in another run."""
    try:
        _, metadata = load_file(path)
    except CaptureError as error:
        content.problems.append(str(error))
        return
    owner = metadata.get("run_id")
    if owner == content.run or (owner is None and run is None):
        content.records.append(record.with_metadata(metadata, overrides=True))


def _names(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_EXAMPLES])
    return shown if len(names) <= _EXAMPLES else f"{shown} and {len(names) - _EXAMPLES} more"
