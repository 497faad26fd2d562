"""Writing a capture as `pt` files: one self-contained file a row, as `--tensor-save-format pt` writes them.

Names, metadata, references and manifests are those that the run would have left in that format: a weight is written
once an optimizer step and referred to, everything else has a file of its own. Every tensor is hashed on the way, and
one that is not what was written ends the export: damage is not passed on. Files that a user saved by hand belong to no
run and stay where they are.

All of it is written below a temporary name in the destination and moved in place at the end, each run's folder last:
without its manifests a run is not there. What fails is taken back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.quantscope.capture.budget import Budget
from megatron.quantscope.capture.errors import CaptureError
from megatron.quantscope.capture.files import give_name, temporary_for
from megatron.quantscope.capture.folder import RUNS_FOLDER, CaptureFolder
from megatron.quantscope.capture.hashing import bytes_of, checksum
from megatron.quantscope.capture.ledger import Tally
from megatron.quantscope.capture.manifest import ManifestWriter, line_of, manifest_path
from megatron.quantscope.capture.names import SUFFIX, check_part
from megatron.quantscope.capture.plain import to_json
from megatron.quantscope.capture.pt_store import WRITTEN_ONCE
from megatron.quantscope.capture.reader import capture_folders
from megatron.quantscope.capture.record import NO_STORE, PT, TensorRecord
from megatron.quantscope.capture.rows import BLOCKS_SUFFIX
from megatron.quantscope.capture.run_folder import Manifest, RunFolder, run_folders
from megatron.quantscope.capture.run_record import RUN_FILE
from megatron.quantscope.capture.segment_file import map_tensor
from megatron.quantscope.capture.segments import Segments
from megatron.quantscope.capture.verify_file import wrong_digest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class _Source:
    """One run of one type that is exported."""

    folder: Path
    run: RunFolder
    manifests: Sequence[Manifest]
    quant_type: str

    def records(self, manifest: Manifest) -> list[TensorRecord]:
        """The rows of one rank; any that can not be read ends the export."""
        if manifest.unreadable or manifest.broken:
            raise CaptureError(f"{self.run.path} is damaged: {manifest.problems[0]}")
        try:
            records = [
                TensorRecord.from_row(row, self.folder, self.run.path, committed=row["iteration"] in manifest.commits)
                for row in manifest.rows
            ]
            for record in records:
                record.name.filename()  # of its parts
            return records
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CaptureError(f"{self.run.path / manifest.name} has a row that can not be read: {error!r}") from error


def export(source: str | os.PathLike[str], destination: str | os.PathLike[str], run: str | None = None) -> Tally:
    """Write a capture as `pt` files.

    Args:
        source: A capture in any format, as for `open_capture`.
        destination: The capture root to write to, made if it is not there; other runs in it stay as they are.
        run: Which run; None: of every type the latest that kept anything.

    Returns:
        Rows, files and bytes that were written.

    Raises:
        CaptureError: when the run is not there or damaged, is in the destination already, or can not be written;
            nothing is left behind then.
    """
    target = Path(destination)
    sources = _sources(Path(source), run)
    for each in sources:
        there = target / each.quant_type / RUNS_FOLDER / each.run.run_id
        if there.exists():
            raise CaptureError(f"{there} exists and is not overwritten")
    made = not target.exists()
    stage, total, done = temporary_for(target / "export"), Tally(), False
    try:
        stage.mkdir(parents=True)
        for each in sources:
            _write_run(each, stage / each.quant_type, total)
        _put_in_place(sources, stage, target)
        done = True
    except FileExistsError as error:
        raise CaptureError(f"{error.filename2 or error.filename} exists and is not overwritten") from error
    except OSError as error:
        raise CaptureError(f"can not write {error.filename or target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if made and not done:
            with contextlib.suppress(OSError):
                target.rmdir()
    return total


def _sources(root: Path, run: str | None) -> list[_Source]:
    try:
        folders = {folder: run_folders(folder) for folder in capture_folders(root)}
        found = [source for folder, runs in folders.items() if (source := _source(folder, runs, run))]
    except OSError as error:
        raise CaptureError(f"can not read {error.filename or root}: {error.strerror or error}") from error
    if not found:
        known = sorted({each.run_id for runs in folders.values() for each in runs})
        wanted = f"run {run}" if run else "run that kept anything"
        raise CaptureError(f"no {wanted} in {root}: there are {', '.join(known) or 'none'}")
    return found


def _source(folder: Path, runs: Sequence[RunFolder], run: str | None) -> _Source | None:
    for candidate in reversed(runs):
        manifests = candidate.manifests()
        if candidate.run_id == run or (run is None and any(manifest.rows for manifest in manifests)):
            quant_type = str(candidate.info().get("quant_type") or folder.name)
            check_part("quant_type", quant_type)  # it becomes a folder's name
            return _Source(folder=folder, run=candidate, manifests=manifests, quant_type=quant_type)
    return None


def _write_run(source: _Source, folder: Path, total: Tally) -> None:
    run_folder = folder / RUNS_FOLDER / source.run.run_id
    run_folder.mkdir(parents=True)
    info = {"run_id": source.run.run_id, "quant_type": source.quant_type, **source.run.info()}
    text = to_json(info | {"exported_from": str(source.folder)})
    (run_folder / RUN_FILE).write_text(text + "\n", encoding="utf-8")
    for manifest in source.manifests:
        _add(total, _write_rank(source, manifest, folder))


def _write_rank(source: _Source, manifest: Manifest, folder: Path) -> Tally:
    """One rank's rows, iteration by iteration, and its manifest."""
    records = source.records(manifest)
    lines = ManifestWriter(manifest_path(folder / RUNS_FOLDER / source.run.run_id, manifest.rank))
    of_iteration = defaultdict[int | None, list[TensorRecord]](list)
    for record in records:
        of_iteration[record.iteration].append(record)
    maps = max((sum(record.blocks is not None for record in each) for each in of_iteration.values()), default=0)
    writer = _RankWriter(source, manifest.rank, folder, maps)
    total = Tally()
    for iteration in sorted({row["iteration"] for row in manifest.rows} | manifest.commits.keys()):
        tally = Tally()
        rows = [writer.write(record, tally) for record in of_iteration[iteration]]
        lines.append_lines(writer.finish(iteration, tally) + rows)
        commit = manifest.commits.get(iteration)
        if commit is not None:
            lines.append("commit", {"iteration": iteration, **vars(tally), "scalars": commit["scalars"]})
        _add(total, tally)
    for end in manifest.ends:
        lines.append(end["kind"], vars(total) if end["kind"] == "closed" else {"reason": end["reason"]})
    lines.close()
    return total


class _RankWriter:
    """Writes the files of one rank; `maps` is how many rows of an iteration have a map of block exponents."""

    def __init__(self, source: _Source, rank: int, folder: Path, maps: int) -> None:
        self._files = CaptureFolder(folder, rank)
        self._segments = Segments(
            folder / RUNS_FOLDER / source.run.run_id,
            rank=rank,
            labels={"run_id": source.run.run_id, "quant_type": source.quant_type, "rank": str(rank)},
            budget=Budget(sys.maxsize),
            tensors_expected=lambda: maps,
        )
        self._weights: dict[str | None, dict[str, Any]] = {}  # module -> the last row of its weight, as a line has it

    def write(self, record: TensorRecord, tally: Tally) -> str:
        """Write what a row has beside its line.

        Returns:
            The line.
        """
        metadata = record.to_dict()
        place: dict[str, Any] = {"store": NO_STORE, "file": None, "offset": None, "bytes": 0}
        place |= {"checksum": record.checksum, "reference": False}
        size = None
        if record.location is not None:
            place["store"] = PT
            earlier = self._weights.get(record.module) if record.tensor_name == WRITTEN_ONCE else None
            if earlier and (earlier["iteration"], earlier["checksum"]) == (record.iteration, record.checksum):
                place |= {"file": earlier["file"], "bytes": earlier["bytes"], "reference": True}
            else:
                path, size = self._files.write(record.name, {"tensor": _intact(record), "metadata": metadata})
                place |= {"file": path.name, "bytes": size}
            if record.tensor_name == WRITTEN_ONCE:
                self._weights[record.module] = place | {"iteration": record.iteration}
        tally.add_row(size)
        statistics = None if record.statistics is None else record.statistics.to_json()
        figures = {"statistics": statistics, "blocks": self._blocks(record)}
        return line_of("tensor", place | {"counter": record.counter} | metadata | figures)

    def finish(self, iteration: int, tally: Tally) -> list[str]:
        """Complete the iteration's segment.

        Returns:
            The lines that say so.
        """
        closed = self._segments.finish(iteration)
        for segment in closed:
            tally.add_file(segment.bytes)
        return [line_of("segment", {"iteration": iteration, **vars(segment)}) for segment in closed]

    def _blocks(self, record: TensorRecord) -> dict[str, Any] | None:
        """Write the row's map."""
        place = record.blocks
        if place is None or record.run_folder is None:
            return None
        content = map_tensor(record.run_folder / place["file"], place["offset"], place["shape"], "uint8")
        name = record.name.filename().removesuffix(SUFFIX) + BLOCKS_SUFFIX
        kept = self._segments.append(record.iteration or 0, name, content, checksum(content))
        return place | {"file": kept.file, "offset": kept.offset}


def _intact(record: TensorRecord) -> torch.Tensor:
    """The record's tensor, when it is what was written."""
    assert record.location is not None
    tensor = record.location.load()
    wrong = wrong_digest(record, lambda: bytes_of(tensor), {})
    if wrong:
        raise CaptureError(f"{record.path} is damaged: {wrong}")
    return tensor


def _add(total: Tally, tally: Tally) -> None:
    total.rows += tally.rows
    total.files += tally.files
    total.bytes += tally.bytes


def _put_in_place(sources: Sequence[_Source], stage: Path, target: Path) -> None:
    """Give everything its name, each run's folder after its files; takes it back when that fails."""
    with contextlib.ExitStack() as undo:
        for source in sources:
            staged, final = stage / source.quant_type, target / source.quant_type
            _make(final, undo)
            for path in sorted(staged.glob(f"*{SUFFIX}")):
                give_name(path, final / path.name)
                undo.callback((final / path.name).unlink)
            runs = final / RUNS_FOLDER
            _make(runs, undo)
            os.rename(staged / RUNS_FOLDER / source.run.run_id, runs / source.run.run_id)
            undo.callback(shutil.rmtree, runs / source.run.run_id)
        undo.pop_all()


def _make(folder: Path, undo: contextlib.ExitStack) -> None:
    if not folder.exists():
        folder.mkdir()
        undo.callback(folder.rmdir)
