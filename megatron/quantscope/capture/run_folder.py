"""Reading back what one run left in one type folder: its `run.json`, the manifests of its ranks, and its segments.

A line of a manifest is checked once, here, against what a line of its kind must hold, so that nobody need ask again; a
line that is not one is left out and named. Lines of schema 1 are read as if they were of schema 2, which says more.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from megatron.quantscope.capture.files import TEMPORARY_PREFIX
from megatron.quantscope.capture.folder import RUNS_FOLDER
from megatron.quantscope.capture.record import NO_STORE, PT, SEGMENT
from megatron.quantscope.capture.run_record import RUN_FILE
from megatron.quantscope.capture.segment_file import SEGMENT_SUFFIX

LOGS = ("train.log",)  # what the driver puts beside the manifests
MANIFEST_NAME = re.compile(r"manifest_rank(\d+)\.jsonl")

_SCHEMAS = (1, 2)
_ADDED_BY_SCHEMA_2 = {"store": PT, "offset": None, "blocks": None}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One rank's manifest.

    Attributes:
        rank: Global rank.
        name: Its file name.
        rows: Tensor rows in the order of their counters.
        commits: Iteration -> its commit record.
        segments: File name -> the record of that segment.
        ends: The records that end a run, `closed` and `stopped`.
        broken: Numbers of the lines that can not be read.
        unreadable: Why nothing could be read at all.
    """

    rank: int
    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    commits: dict[int, dict[str, Any]] = field(default_factory=dict)
    segments: dict[str, dict[str, Any]] = field(default_factory=dict)
    ends: list[dict[str, Any]] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    unreadable: str | None = None

    @property
    def problems(self) -> list[str]:
        """Lines that can not be read, and an early end."""
        found = [f"{self.name}: {self.unreadable}"] if self.unreadable else []
        found += [f"{self.name}: line {number} is broken and left out" for number in self.broken]
        early = (end["reason"] for end in self.ends if end["kind"] == "stopped")
        return found + [f"{self.name}: collecting ended early: {reason}" for reason in early]

    @property
    def uncommitted(self) -> dict[int, int]:
        """Iteration -> number of its rows, for the iterations that were not completed."""
        return dict(Counter(row["iteration"] for row in self.rows if row["iteration"] not in self.commits))

    @property
    def tensor_files(self) -> set[str]:
        """The files of the type folder that rows name."""
        return {row["file"] for row in self.rows if row["store"] == PT}

    @property
    def segment_files(self) -> set[str]:
        """The files of the run folder that lines name."""
        named = {row["file"] for row in self.rows if row["store"] == SEGMENT}
        maps = {row["blocks"]["file"] for row in self.rows if row["blocks"]}
        return named | maps | set(self.segments)


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
        names = os.listdir(self.path)  # and not `files`, which is to be listed after the lines that name them
        found = [(int(match[1]), name) for name in names if (match := MANIFEST_NAME.fullmatch(name))]
        return [_read(rank, self.path / name) for rank, name in sorted(found)]

    @cached_property
    def files(self) -> RunFiles:
        """What lies in the folder."""
        return _list(self.path)

    def tensor_files(self) -> set[str]:
        """Every file of the type folder that a manifest of this run names."""
        return {name for manifest in self.manifests() for name in manifest.tensor_files}


@dataclass(frozen=True)
class RunFiles:
    """The files of a run folder.

    Attributes:
        manifests: Names.
        segments: Name -> size in bytes.
        unfinished: Names of files that a run began and did not complete.
        foreign: Names of everything else but `run.json` and logs.
    """

    manifests: list[str] = field(default_factory=list)
    segments: dict[str, int] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)


def run_folders(folder: Path) -> list[RunFolder]:
    """The runs of a type folder, the oldest first; one that an export began and did not complete is none."""
    runs = folder / RUNS_FOLDER
    if not runs.is_dir():
        return []
    found = (path for path in runs.iterdir() if path.is_dir() and not path.name.startswith(TEMPORARY_PREFIX))
    return sorted((RunFolder(path) for path in found), key=RunFolder.age_key)


def _list(folder: Path) -> RunFiles:
    files = RunFiles()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(TEMPORARY_PREFIX):
                files.unfinished.append(entry.name)
            elif MANIFEST_NAME.fullmatch(entry.name):
                files.manifests.append(entry.name)
            elif entry.is_file() and entry.name.endswith(SEGMENT_SUFFIX):
                files.segments[entry.name] = entry.stat().st_size
            elif entry.name not in (RUN_FILE, *LOGS):
                files.foreign.append(entry.name)
    return files


def _read(rank: int, path: Path) -> Manifest:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        return Manifest(rank=rank, name=path.name, unreadable=f"can not be read: {error.strerror or error}")
    manifest = Manifest(rank=rank, name=path.name)
    for number, line in _numbered(lines):
        entry = parse_line(line)
        if entry is None:
            manifest.broken.append(number)
        elif entry["kind"] == "tensor":
            manifest.rows.append(entry)
        elif entry["kind"] == "commit":
            manifest.commits[entry["iteration"]] = entry
        elif entry["kind"] == "segment":
            manifest.segments[entry["file"]] = entry
        else:
            manifest.ends.append(entry)
    manifest.rows.sort(key=lambda row: row["counter"])
    return manifest


def _numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    return ((number, line) for number, line in enumerate(lines, start=1) if line)


# What a line must hold, so that readers need not ask again.
_ROW = {"reference": bool, "counter": int, "iteration": int, "quant_type": str, "bytes": int, "store": str}
_REQUIRED: dict[str, dict[str, type]] = {
    "tensor": _ROW,
    "segment": {"file": str, "bytes": int, "iteration": int},
    "commit": {"iteration": int, "scalars": dict},
    "stopped": {"reason": str},
    "closed": {},
}
_REQUIRED_BY_STORE: dict[str, dict[str, type]] = {
    PT: {"file": str},
    SEGMENT: {"file": str, "offset": int},
    NO_STORE: {},
}
_SAME_TEXTS = (
    "layer_type",
    "operation",
    "quant_type",
    "tensor_name",
    "phase",
    "component",
    "save_time",
    "module",
    "gemm",
    "dtype",
    "stage",
    "run_id",
)
_SAME_MAPPINGS = ("formats", "parallel")
_BLOCKS = {"file": str, "offset": int, "shape": list, "size": int, "counts": dict}


def parse_line(line: bytes) -> dict[str, Any] | None:
    """One line's entry, as schema 2 has it; None when it is not one."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or entry.get("schema") not in _SCHEMAS:
        return None
    if entry["schema"] == 1 and entry.get("kind") == "tensor":
        entry |= _ADDED_BY_SCHEMA_2
    required = _REQUIRED.get(str(entry.get("kind")))
    if required is None or not _holds(entry, required):
        return None
    if entry["kind"] == "commit":
        return _with_numbers(entry)
    if entry["kind"] != "tensor":
        return entry
    return _sharing(entry) if _is_row(entry) else None


def _sharing(entry: dict[str, Any]) -> dict[str, Any]:
    """The row, with what it has in common with rows before it held once: else most of a large capture's memory."""
    for name in _SAME_TEXTS:
        if isinstance(entry.get(name), str):
            entry[name] = sys.intern(entry[name])
    for name in _SAME_MAPPINGS:
        if isinstance(entry.get(name), dict):
            entry[name] = _shared(json.dumps(entry[name]))
    return entry


@lru_cache(maxsize=4096)
def _shared(text: str) -> dict[str, Any]:
    """The dict of this text, which nobody changes: records are frozen, and what is written is copied first."""
    content: dict[str, Any] = json.loads(text)
    return content


def _is_row(entry: Mapping[str, Any]) -> bool:
    required = _REQUIRED_BY_STORE.get(entry["store"])
    blocks = entry.get("blocks")
    whole_map = blocks is None or (isinstance(blocks, dict) and _holds(blocks, _BLOCKS) and _is_shape(blocks["shape"]))
    described = entry.get("shape") is None or (isinstance(entry["shape"], list) and _is_shape(entry["shape"]))
    named = entry.get("dtype") is None or isinstance(entry["dtype"], str)
    return required is not None and _holds(entry, required) and whole_map and described and named


def _is_shape(shape: list[Any]) -> bool:
    return all(isinstance(size, int) and size >= 0 for size in shape)


def _holds(entry: Mapping[str, Any], required: Mapping[str, type]) -> bool:
    """Whether every field is there, of its type, with no name that leads out of the folder and no negative place."""
    if not all(isinstance(entry.get(name), kind) for name, kind in required.items()):
        return False
    named = "file" not in required or is_plain_name(entry["file"])
    return named and all(entry[name] >= 0 for name in ("offset", "bytes") if name in required)


def is_plain_name(name: str) -> bool:
    """Whether `name` is that of a file in the folder itself."""
    return name not in ("", ".", "..") and Path(name).name == name


def _with_numbers(entry: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return entry | {"scalars": {name: float(value) for name, value in entry["scalars"].items()}}
    except (TypeError, ValueError):
        return None
