"""Checking a capture: everything that was written is there, unchanged, and nothing else is.

Every run of every type is gone through. Each tensor is hashed again and compared with the checksum in its manifest row,
each `pt` file's own metadata with the row, each segment's header with the rows that name its tensors, each block map
with its counts, each commit record with the rows and files of its iteration. Files are mapped one at a time, so memory
stays that of none. What is wrong is a `Finding`:

| kind | what |
|---|---|
| damaged | a file or a part of it is not what was written |
| missing | a file, or a row that something else speaks of, is not there |
| foreign | a file that no capture writes there |
| unfinished | a file, or a run, that was begun and not completed: killed, or still going on |
| uncommitted | rows of an iteration that was not completed; they are readable |
| broken-line | a line of a manifest that can not be read |

A `pt` file with a captured file's name that no manifest lists is a direct save of the user's: it has to be readable.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.files import TEMPORARY_PREFIX
from megatron.quantscope.capture.folder import RUNS_FOLDER
from megatron.quantscope.capture.folder_reader import list_folder
from megatron.quantscope.capture.names import parse_name
from megatron.quantscope.capture.reader import capture_folders
from megatron.quantscope.capture.report import DAMAGED, FOREIGN, UNFINISHED, Finding, Report, Verification
from megatron.quantscope.capture.run_folder import RunFolder, run_folders
from megatron.quantscope.capture.tensor_file import load_file
from megatron.quantscope.capture.verify_run import RunCheck

if TYPE_CHECKING:
    import os

__all__ = ["Finding", "Verification", "verify"]

ALL_RUNS = "all"


def verify(directory: str | os.PathLike[str], run: str | None = None) -> Verification:
    """Check a capture.

    Args:
        directory: As for `open_capture`.
        run: Check what belongs to this run alone; None or "all": all runs, and that there is nothing else.

    Raises:
        CaptureError: when there is no such directory, nothing captured in it, or not that run.
    """
    root = Path(directory)
    report = Report(root)
    try:
        folders = capture_folders(root)
        if not folders:
            raise CaptureError(f"no captures in {root}: neither .pt files nor folders of them")
        runs = {folder: run_folders(folder) for folder in folders}
        if run in (None, ALL_RUNS):
            _check_others(root, folders, report)
        elif not any(each.run_id == run for found in runs.values() for each in found):
            known = ", ".join(sorted({each.run_id for found in runs.values() for each in found}))
            raise CaptureError(f"no run {run} in {root}: there are {known or 'none'}")
        for folder in folders:
            _check_folder(folder, runs[folder], None if run == ALL_RUNS else run, report)
    except FileNotFoundError as error:
        raise CaptureError(f"no such file or directory: {error.filename or root}") from None
    except OSError as error:
        raise CaptureError(f"can not read {error.filename or root}: {error.strerror or error}") from error
    return report.result()


def _check_others(root: Path, folders: list[Path], report: Report) -> None:
    """Everything beside captured files and runs."""
    for folder in dict.fromkeys((root, *folders)):
        for path in sorted(path for path in folder.iterdir() if path.is_dir() and path not in folders):
            if path.name.startswith(TEMPORARY_PREFIX):
                report.find(UNFINISHED, path, "an export that was killed or still goes on")
            elif path.name != RUNS_FOLDER:
                report.find(FOREIGN, path, "a folder without captures")
        files = list_folder(folder)
        for name in sorted(files.unfinished):
            if not (folder / name).is_dir():
                report.find(UNFINISHED, folder / name, "of a run that was killed or still goes on")
        for name in sorted(files.foreign):
            report.find(FOREIGN, folder / name, "no file of a capture")
        runs = folder / RUNS_FOLDER
        for path in sorted(runs.iterdir()) if runs.is_dir() else ():
            if path.name.startswith(TEMPORARY_PREFIX):
                report.find(UNFINISHED, path, "an export that was killed or still goes on")
            elif not path.is_dir():
                report.find(FOREIGN, path, "no folder of a run")


def _check_folder(folder: Path, runs: list[RunFolder], run: str | None, report: Report) -> None:
    checks = [RunCheck(folder, each, report) for each in runs if run is None or each.run_id == run]
    sizes = list_folder(folder).sizes  # after the manifests, which may still grow: a file is there before its line
    listed = set()
    for check in checks:
        check.check(sizes)
        listed |= check.tensor_files
    if run is None:
        for name in sorted(sizes.keys() - listed):
            _check_bare(folder / name, sizes[name], report)


def _check_bare(path: Path, size: int, report: Report) -> None:
    if parse_name(path.name) is None:
        report.find(FOREIGN, path, "no name that a captured file has")
        return
    try:
        load_file(path)
    except CaptureError as error:
        report.find(DAMAGED, path, str(error))
        return
    report.ok += 1
    report.bytes += size
