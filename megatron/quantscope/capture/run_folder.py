"""Reading back what one run left in one type folder: its `run.json` and the manifests of its ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.quantscope.capture.folder import RUNS_FOLDER
from megatron.quantscope.capture.manifest import SCHEMA
from megatron.quantscope.capture.run_record import RUN_FILE

_MANIFEST = re.compile(r"manifest_rank(\d+)\.jsonl")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One rank's manifest.

    Attributes:
        rank: Global rank.
        rows: Tensor rows in the order of their counters.
        commits: Iteration -> scalars of its commit record.
        problems: Lines that can not be read, and an early end.
    """

    rank: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    commits: dict[int, dict[str, float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def uncommitted(self) -> dict[int, int]:
        """Iteration -> number of its rows, for the iterations that were not completed."""
        counts: dict[int, int] = {}
        for row in self.rows:
            if row["iteration"] not in self.commits:
                counts[row["iteration"]] = counts.get(row["iteration"], 0) + 1
        return counts


@dataclass(frozen=True)
class RunFolder:
    """One run of a type folder."""

    path: Path

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.path.name

    def info(self) -> dict[str, Any]:
        """What `run.json` says; empty when it is missing or broken."""
        try:
            info = json.loads((self.path / RUN_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return info if isinstance(info, dict) else {}

    def age_key(self) -> tuple[str, str]:
        """Sorts runs from the oldest to the latest."""
        return str(self.info().get("created", "")), self.run_id

    def manifests(self) -> list[Manifest]:
        """The manifests of all ranks, rank by rank."""
        found = [(int(match[1]), path) for path in self.path.iterdir() if (match := _MANIFEST.fullmatch(path.name))]
        return [_read(rank, path) for rank, path in sorted(found)]

    def listed_files(self) -> set[str]:
        """Every file name that a manifest of this run holds."""
        return {row["file"] for manifest in self.manifests() for row in manifest.rows}


def run_folders(folder: Path) -> list[RunFolder]:
    """The runs of a type folder, the oldest first."""
    runs = folder / RUNS_FOLDER
    if not runs.is_dir():
        return []
    return sorted((RunFolder(path) for path in runs.iterdir() if path.is_dir()), key=RunFolder.age_key)


def _read(rank: int, path: Path) -> Manifest:
    manifest = Manifest(rank=rank)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        manifest.problems.append(f"{path.name}: can not be read: {error.strerror or error}")
        return manifest
    for number, line in _numbered(lines):
        entry = _parse(line)
        if entry is None:
            manifest.problems.append(f"{path.name}: line {number} is broken and left out")
        elif entry["kind"] == "tensor":
            manifest.rows.append(entry)
        elif entry["kind"] == "commit":
            manifest.commits[entry["iteration"]] = {name: float(value) for name, value in entry["scalars"].items()}
        elif entry["kind"] == "stopped":
            manifest.problems.append(f"{path.name}: collecting ended early: {entry['reason']}")
    manifest.rows.sort(key=lambda row: row["counter"])
    return manifest


def _numbered(lines: list[bytes]) -> Iterator[tuple[int, bytes]]:
    return ((number, line) for number, line in enumerate(lines, start=1) if line)


# What a line must hold, so that readers need not ask again.
_REQUIRED: dict[str, dict[str, type]] = {
    "tensor": {"file": str, "bytes": int, "reference": bool, "counter": int, "iteration": int, "quant_type": str},
    "commit": {"iteration": int, "scalars": dict},
    "stopped": {"reason": str},
    "closed": {},
}


def _parse(line: bytes) -> dict[str, Any] | None:
    """One line's entry; None when it is not one."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or entry.get("schema") != SCHEMA:
        return None
    required = _REQUIRED.get(str(entry.get("kind")))
    if required is None or not all(isinstance(entry.get(name), kind) for name, kind in required.items()):
        return None
    if entry["kind"] == "tensor" and Path(entry["file"]).name != entry["file"]:
        return None  # a name that leads out of the folder
    return entry
