"""One run whose nodes kept their tensors in directories of their own: the type folders of all of them together.

Every node has the run's id, so what belongs together is known without asking the nodes: the folders of one quant type
are read for one run, the latest that any of them holds. A rank writes in one place only. Where two folders have the
same rank of a run, one is a copy, and its tensors would count twice: that is refused.
"""

from __future__ import annotations

from pathlib import Path

from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.folder import RUNS_FOLDER
from megatron.quantscope.capture.folder_reader import FolderContent, read_folder


def of_one_run(contents: dict[Path, FolderContent], run: str | None) -> dict[Path, FolderContent]:
    """The contents of type folders of several directories, of each type those of one run.

    Args:
        contents: Type folder -> what it holds, of the run that was asked for, else of its own latest run.
        run: The run that was asked for.

    Raises:
        CaptureError: when two folders hold the same rank of a run.
    """
    latest: dict[str, str] = {}
    for folder, content in contents.items():
        quant_type = content.quant_type(folder)
        latest[quant_type] = max(latest.get(quant_type, ""), run or content.run or "")
    chosen = {}
    for folder, content in contents.items():
        wanted = latest[content.quant_type(folder)]
        older = wanted and content.run is not None and content.run != wanted
        chosen[folder] = read_folder(folder, wanted) if older else content
        if wanted and chosen[folder].run is None and content.run_ids:
            chosen[folder].problems.append(f"{RUNS_FOLDER}: nothing of run {wanted}, which another directory has")
    _require_each_rank_once(chosen)
    return chosen


def _require_each_rank_once(contents: dict[Path, FolderContent]) -> None:
    found: dict[tuple[str, int | None], Path] = {}
    for folder, content in contents.items():
        for rank in {record.rank for record in content.records if record.run_folder is not None}:
            first = found.setdefault((f"{content.quant_type(folder)} {content.run}", rank), folder)
            if first != folder:
                raise CaptureError(f"rank {rank} of run {content.run} is in {first} and in {folder}: is one a copy?")
