"""Checking one run of one type: its record, its manifests, and that their lines agree with each other and the files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.quantscope.capture.filter import TensorFilter
from megatron.quantscope.capture.manifest import manifest_path
from megatron.quantscope.capture.record import NO_STORE, PT, TensorRecord
from megatron.quantscope.capture.report import (
    BROKEN_LINE,
    DAMAGED,
    FOREIGN,
    MISSING,
    UNCOMMITTED,
    UNFINISHED,
    Report,
)
from megatron.quantscope.capture.run_folder import Manifest, RunFolder
from megatron.quantscope.capture.run_record import RUN_FILE
from megatron.quantscope.capture.verify_file import check_file
from megatron.quantscope.capture.verify_segment import Segment, check_segment

_COUNTED = ("rows", "files", "bytes")  # in a commit record


class RunCheck:
    """Checks one run.

    Args:
        folder: The type folder.
        run: The run.
        sizes: Name -> bytes of the `.pt` files of the type folder.
        report: Where findings go.
    """

    def __init__(self, folder: Path, run: RunFolder, report: Report) -> None:
        self._folder = folder
        self._run = run
        self._sizes: Mapping[str, int] = {}
        self._report = report
        self._manifests = run.manifests()

    @property
    def tensor_files(self) -> set[str]:
        """The files of the type folder that belong to the run."""
        return {name for manifest in self._manifests for name in manifest.tensor_files}

    def check(self, sizes: Mapping[str, int]) -> None:
        """Find everything that is wrong; `sizes` of the type folder's files, listed after the manifests were read."""
        self._sizes = sizes
        files = self._run.files
        for name in sorted(files.unfinished):
            self._report.find(UNFINISHED, self._run.path / name, "of a run that was killed or still goes on")
        for name in sorted(files.foreign):
            self._report.find(FOREIGN, self._run.path / name, "no file of a run")
        self._check_record()
        for manifest in self._manifests:
            self._check_manifest(manifest)
        self._check_content()

    def _check_record(self) -> None:
        """`run.json`, and that every rank which it speaks of has a manifest."""
        path = self._run.path / RUN_FILE
        info = self._run.info()
        if not info:
            kind, message = (DAMAGED, "no JSON object") if path.is_file() else (MISSING, "missing")
            self._report.find(kind, path, message)
            return
        there = {manifest.rank for manifest in self._manifests}
        for rank in sorted(_ranks(info) - there):
            self._report.find(MISSING, manifest_path(self._run.path, rank), "missing")

    def _check_manifest(self, manifest: Manifest) -> None:
        path = self._run.path / manifest.name
        if manifest.unreadable:
            self._report.find(DAMAGED, path, manifest.unreadable)
            return
        for number in manifest.broken:
            self._report.find(BROKEN_LINE, path, f"line {number} can not be read")
        for iteration, count in manifest.uncommitted.items():
            self._report.find(UNCOMMITTED, path, f"iteration {iteration} was not completed: {count} rows are there")
        if not manifest.ends:
            self._report.find(UNFINISHED, path, "the run was killed or still goes on: its end is not there")
        counted = _counts(manifest)
        for iteration, commit in manifest.commits.items():
            there = counted[iteration]
            for name in _COUNTED:
                said = commit.get(name, there[name])
                if said != there[name]:
                    message = f"iteration {iteration} was committed with {said} {name}, its lines have {there[name]}"
                    self._report.find(MISSING, path, message)

    def _check_content(self) -> None:
        """Every tensor and every map, file by file."""
        files, tensors, maps = (defaultdict[str, list[TensorRecord]](list) for _ in range(3))
        for record in (record for manifest in self._manifests for record in self._records(manifest)):
            if record.path is not None:
                (files if record.store == PT else tensors)[record.path.name].append(record)
            else:
                self._report.ok += 1
            if record.blocks:
                maps[record.blocks["file"]].append(record)
        for name in sorted(files):
            check_file(self._folder / name, self._sizes.get(name), files[name], self._report)
        lines = {name: (manifest, line) for manifest in self._manifests for name, line in manifest.segments.items()}
        sizes = self._run.files.segments
        for name in sorted(tensors.keys() | maps.keys() | lines.keys() | sizes.keys()):
            segment = Segment(
                path=self._run.path / name,
                size=sizes.get(name),
                line=lines[name][1] if name in lines else None,
                committed=name in lines and lines[name][1]["iteration"] in lines[name][0].commits,
                labels={"run_id": self._run.run_id} | (_labels(*lines[name]) if name in lines else {}),
                tensors=tensors[name],
                maps=maps[name],
            )
            check_segment(segment, self._report)

    def _records(self, manifest: Manifest) -> list[TensorRecord]:
        """The records of the rows that say all they must."""
        records = []
        for row in manifest.rows:
            try:
                record = TensorRecord.from_row(row, self._folder, self._run.path, committed=True)
                record.name.filename()  # of its parts
                if record.store != NO_STORE and not (record.checksum and record.dtype and record.shape is not None):
                    raise ValueError("a tensor without a checksum, dtype or shape")
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                message = f"the row with counter {row['counter']} can not be read: {error!r}"
                self._report.find(BROKEN_LINE, self._run.path / manifest.name, message)
            else:
                records.append(record)
        return records


def _labels(manifest: Manifest, line: Mapping[str, Any]) -> dict[str, str]:
    """What a segment's header says of itself, by the line that names it."""
    labels = {"rank": str(manifest.rank), "iteration": str(line["iteration"])}
    return labels | ({"quant_type": manifest.rows[0]["quant_type"]} if manifest.rows else {})


def _ranks(info: Mapping[str, Any]) -> set[int]:
    """The ranks that kept anything, by `run.json`."""
    world_size, capture = info.get("world_size"), info.get("capture")
    try:
        kept = TensorFilter(ranks=((capture or {}).get("filter") or {}).get("ranks"))
        return {rank for rank in range(world_size or 0) if kept.keeps_rank(rank)}
    except (AttributeError, TypeError, ValueError):  # not as this tool writes them
        return set()


def _counts(manifest: Manifest) -> Mapping[int, Counter[str]]:
    """What the lines of each iteration come to, as a commit counts."""
    counts = defaultdict[int, Counter[str]](Counter)
    for row in manifest.rows:
        of_its_own = row["store"] == PT and not row["reference"]
        counts[row["iteration"]].update(rows=1, files=of_its_own, bytes=row["bytes"] * of_its_own)
    for segment in manifest.segments.values():
        counts[segment["iteration"]].update(files=1, bytes=segment["bytes"])
    return counts
