"""Reading back one folder of captured files: the rows of one run, and the files that no manifest lists.

A listed file is checked by its size against the manifest. A file that no run lists stands for itself: a user's own
`save_tensor`, another tool's, or the last file of a killed run. It belongs to the run that its metadata names; one that
names none belongs to every reading.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.files import TEMPORARY_PREFIX
from megatron.quantscope.capture.folder import RUNS_FOLDER
from megatron.quantscope.capture.names import SUFFIX, parse_name
from megatron.quantscope.capture.record import TensorRecord
from megatron.quantscope.capture.run_folder import Manifest, RunFolder, run_folders
from megatron.quantscope.capture.tensor_file import damage, load_file

_EXAMPLES = 3  # names that a summarising message gives


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


def holds_captures(folder: Path) -> bool:
    """Whether `folder` itself, not one below it, holds captured files or the records of runs."""
    with os.scandir(folder) as entries:
        return any(entry.name == RUNS_FOLDER or entry.name.endswith(SUFFIX) for entry in entries)


def read_folder(folder: Path, run: str | None) -> FolderContent:
    """Everything in `folder` that belongs to `run`; None: to the latest run that kept anything."""
    content = FolderContent()
    sizes = _list(folder, content)
    runs = run_folders(folder)
    content.run_ids = [candidate.run_id for candidate in runs]
    chosen, manifests = _choose(runs, run, content)
    if chosen is not None:
        content.run, content.run_info = chosen.run_id, chosen.info()
    for manifest in manifests:
        _add_rows(folder, manifest, sizes, content)
    if run is None or chosen is not None:
        listed = {row["file"] for manifest in manifests for row in manifest.rows}
        for other in runs:
            if other != chosen:
                listed |= other.listed_files()
        _add_bare_files(folder, {name: size for name, size in sizes.items() if name not in listed}, run, content)
    content.records.sort(key=lambda record: (record.rank or 0, record.counter))
    return content


def _list(folder: Path, content: FolderContent) -> dict[str, int]:
    """Name -> size of the folder's `.pt` files; the rest is mentioned."""
    sizes, foreign, unfinished = {}, [], 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(TEMPORARY_PREFIX):
                unfinished += 1
            elif entry.is_file() and entry.name.endswith(SUFFIX):
                sizes[entry.name] = entry.stat().st_size
            elif entry.is_file() and not entry.name.startswith("."):
                foreign.append(entry.name)
    if unfinished:
        content.problems.append(f"{unfinished} unfinished files of a run that was killed or still goes on")
    if foreign:
        content.problems.append(f"{_names(foreign)}: not captured, left out")
    return sizes


def _choose(runs: list[RunFolder], run: str | None, content: FolderContent) -> tuple[RunFolder | None, list[Manifest]]:
    """The run to read and its manifests."""
    for candidate in reversed(runs):
        if run is not None and candidate.run_id != run:
            continue
        manifests = candidate.manifests()
        if run is not None or any(manifest.rows for manifest in manifests):
            return candidate, manifests
        reasons = [problem for manifest in manifests for problem in manifest.problems]
        content.problems.append("; ".join([f"run {candidate.run_id} kept nothing", *reasons]))
    return None, []


def _add_rows(folder: Path, manifest: Manifest, sizes: dict[str, int], content: FolderContent) -> None:
    content.problems += manifest.problems
    for iteration, scalars in manifest.commits.items():
        content.commits.setdefault(iteration, scalars)  # the lowest rank's: they agree
    for iteration, count in manifest.uncommitted.items():
        content.problems.append(
            f"iteration {iteration} of rank {manifest.rank} was not completed: {count} tensors of it are there"
        )
    wrong = set()
    for row in manifest.rows:
        name = row["file"]
        problem = _size_problem(name, sizes.get(name), row["bytes"])
        if problem is None:
            try:
                committed = row["iteration"] in manifest.commits
                content.records.append(TensorRecord.from_row(row, folder / name, committed=committed))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                problem = f"{name}: its manifest row can not be read: {error!r}"
        if problem is not None and problem not in wrong:  # a file and the rows that refer to it: once
            wrong.add(problem)
            content.problems.append(problem)


def _size_problem(name: str, size: int | None, expected: int) -> str | None:
    if size is None:
        return f"{name}: missing"
    if size != expected:
        return f"{name}: damaged, {size} bytes instead of {expected}"
    return None


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
            _add_of_run(TensorRecord.from_name(name, path, size), run, content)
    if foreign:
        content.problems.append(f"{_names(foreign)}: no name that a captured file has, left out")


def _add_of_run(record: TensorRecord, run: str | None, content: FolderContent) -> None:
    """Take a bare file of a folder with runs when its own metadata does not place it in another run."""
    try:
        _, metadata = load_file(record.path)
    except CaptureError as error:
        content.problems.append(str(error))
        return
    owner = metadata.get("run_id")
    if owner == content.run or (owner is None and run is None):
        content.records.append(record.with_metadata(metadata, overrides=True))


def _names(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_EXAMPLES])
    return shown if len(names) <= _EXAMPLES else f"{shown} and {len(names) - _EXAMPLES} more"
